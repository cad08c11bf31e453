"""Child processes that do not import the parent's main module."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any, Self, TypeVar

import torch

from paceline.errors import RunError, UsageError

RETRY_S = 0.02
ATTEMPTS = 100
UNKNOWN_STATUS = 255  # of multiprocessing, for a process whose parent, the fork server, was killed
FORK_SERVER_KILLED = (
    "the process that forks the workers (Python's multiprocessing.forkserver) was killed, perhaps out of memory"
)
SAFE_PATH = "PYTHONSAFEPATH"
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # multiprocessing makes a folder of its own in it
MOST_TEMPORARY_BYTES = 71  # 104 of a socket's path, less an end and "/pymp-12345678/listener-12345678"
T = TypeVar("T")
LOG = logging.getLogger("paceline")
_main_module = threading.Lock()


class Launcher:
    """Launcher of child processes: a fork server imports the modules that they need and forks them.

    A script needs no main guard. multiprocessing would import the main module in every child, to find objects that
    were pickled by name; a `SharedPickle` pickles the objects of the main module by value.

    Args:
        preload: names of the modules that the fork server imports when it starts.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        check_may_have_children("worker processes", "a simulated cluster, as 4*exp(mean=1)")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))

    def pipe(self, *, duplex: bool = True) -> tuple[Connection, Connection]:
        """Return the two ends of a pipe, first the one that receives."""
        return self._context.Pipe(duplex)

    def start(self, target: Callable[[T], None], arguments: T, has_children: bool = False) -> ForkServerProcess:
        """Start a process that ends with its parent.

        Args:
            target: function of an importable module.
            arguments: argument of the function, a record.
            has_children: whether the process may start processes itself; if so, multiprocessing does not terminate it
                when the parent exits without joining it.

        Raises:
            RunError: the fork server was killed.
        """

        def start() -> ForkServerProcess:
            # multiprocessing lets no daemon process have children.
            process = self._context.Process(target=target, args=(arguments,), daemon=not has_children)
            process.start()
            return process

        return fork(start, "a worker process")


def fork(start: Callable[[], T], what: str) -> T:
    """Call a function that starts a child process of the fork server, again while an old server is ending.

    Args:
        start: function that starts the process and returns it.
        what: name of the process, for the error.

    Raises:
        RunError: the fork server was killed.
    """
    attempts_left = ATTEMPTS
    while True:
        try:
            with without_main_module(), _without_working_folder(), _in_short_temporary_folder():
                return start()
        except (EOFError, ConnectionError) as error:
            attempts_left -= 1
            if not attempts_left or not isinstance(error, ConnectionRefusedError):
                raise RunError(
                    f"cannot start {what}: {FORK_SERVER_KILLED}; train again, or see the system log"
                ) from error
            time.sleep(RETRY_S)  # multiprocessing starts another server once this one has ended


def check_may_have_children(what: str, instead: str) -> None:
    """Check that multiprocessing lets this process start others.

    Args:
        what: processes to start, for the error.
        instead: what needs none of them, for the error.

    Raises:
        UsageError: this is a daemon process.
    """
    if multiprocessing.current_process().daemon:
        raise UsageError(
            f"{what} cannot be started in a daemon process of multiprocessing, as those of a Pool are: start it with "
            f"daemon=False or by concurrent.futures.ProcessPoolExecutor, or give {instead}"
        )


def describe_exit(status: int | None) -> str:
    """Return a phrase that says how a child process ended.

    Args:
        status: exit status, or minus the number of the signal that killed the process.

    >>> describe_exit(-9), describe_exit(3)
    ('killed by SIGKILL, out of memory or kill -9', 'ended with status 3')
    """
    if status is not None and status < 0:
        hint = ", out of memory or kill -9" if -status == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-status).name}{hint}"
    if status == UNKNOWN_STATUS:
        return f"ended with unknown status: {FORK_SERVER_KILLED}"
    return f"ended with status {status}"


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Process-wide settings that results depend on, copied from a parent to its children.

    A child does not run the main module, which may have changed them.
    """

    environment: dict[str, str]
    dtype: torch.dtype
    matmul_precision: str
    is_deterministic: bool
    warns_only: bool
    log_level: int

    @classmethod
    def capture(cls) -> Self:
        """Return the settings of this process."""
        return cls(
            environment=dict(os.environ),
            dtype=torch.get_default_dtype(),
            matmul_precision=torch.get_float32_matmul_precision(),
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
            warns_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            log_level=LOG.getEffectiveLevel(),
        )

    def apply(self) -> None:
        """Set the settings of this process to these."""
        os.environ.clear()
        os.environ.update(self.environment)
        if LOG.getEffectiveLevel() != self.log_level:  # else a level would be set that only holds for now
            LOG.setLevel(self.log_level)
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        if self.is_deterministic != torch.are_deterministic_algorithms_enabled():  # this call imports for 2 s
            torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.warns_only)


def init_child() -> None:
    """Prepare a child process: ignore Ctrl-C, which a terminal sends to all processes, and exit with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)  # `sys.exit` would end this thread alone


class _MainWithoutFile(ModuleType):
    """Proxy of the main module without its `__file__`."""

    def __init__(self, main: ModuleType) -> None:
        super().__init__(main.__name__)
        self._main = main

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            raise AttributeError(name)
        return getattr(self._main, name)


@contextmanager
def _without_working_folder() -> Iterator[None]:
    """Let a Python that starts here import no module of the working directory: a queue.py there hides the library's."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SAFE_PATH, None)  # another thread may have started a process meanwhile
        else:
            os.environ[SAFE_PATH] = before


@contextmanager
def _in_short_temporary_folder() -> Iterator[None]:
    """Let multiprocessing make its sockets in another folder where the paths of those in TMPDIR would be too long.

    Raises:
        UsageError: there is no other folder.
    """
    given, before = tempfile.gettempdir(), tempfile.tempdir
    if len(os.fsencode(given)) > MOST_TEMPORARY_BYTES:
        tempfile.tempdir = next((folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK)), None)
        if tempfile.tempdir is None:
            raise UsageError(
                f"TMPDIR={given} is too long for the sockets of worker processes: give a folder of at most "
                f"{MOST_TEMPORARY_BYTES} bytes"
            )
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the file of the main module, as in an interactive session: multiprocessing then imports none in children."""
    with _main_module:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = _MainWithoutFile(main)
        try:
            yield
        finally:
            sys.modules["__main__"] = main
