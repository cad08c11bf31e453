"""Child processes that do not import the main module of this one."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any, Self

import torch

from paceline.errors import RunError

LOOK_AGAIN_S = 0.02
LOOKS = 100
UNKNOWN_STATUS = 255  # which multiprocessing gives when the fork server, the parent of its processes, is gone
LOG = logging.getLogger("paceline")
_main_module = threading.Lock()


class Launcher:
    """Starts child processes by forking a server process that has imported the modules they need.

    A script needs no main guard: multiprocessing would import the main module in every child, to find there what
    was pickled by name. A `Parcel` pickles by value what the main module defines.

    Args:
        preload: names of modules that the fork server imports, if it is not running yet.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))

    def pipe(self, *, duplex: bool = True) -> tuple[Connection, Connection]:
        """Return the two ends of a pipe, the reading end first."""
        return self._context.Pipe(duplex)

    def start(self, target: Callable[..., None], *arguments: object, has_children: bool = False) -> ForkServerProcess:
        """Start a process that ends with this one.

        Args:
            target: function of an importable module.
            arguments: of the function.
            has_children: whether the process may start processes itself; multiprocessing does not end it then if this
                one exits without having waited for it.

        Raises:
            RunError: the fork server was killed.
        """
        for looks_left in reversed(range(LOOKS)):
            process = self._context.Process(target=target, args=arguments, daemon=not has_children)
            try:
                with without_main_module():
                    process.start()
            except (EOFError, ConnectionError) as error:
                if isinstance(error, ConnectionRefusedError) and looks_left:
                    time.sleep(LOOK_AGAIN_S)  # the server is ending: once it has ended, another one is started
                    continue
                raise RunError(
                    f"cannot start a worker process: {_fork_server_is_gone()}; train again, or look why in the system "
                    "log"
                ) from error
            break
        return process


def describe_exit(status: int | None) -> str:
    """Return in words how a child process ended.

    Args:
        status: exit status; minus the number of the signal that killed it.

    >>> describe_exit(-9), describe_exit(3)
    ('killed by SIGKILL, out of memory or kill -9', 'ended with status 3')
    """
    if status is not None and status < 0:
        hint = ", out of memory or kill -9" if -status == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-status).name}{hint}"
    if status == UNKNOWN_STATUS:
        return f"ended, with a status that is not known: {_fork_server_is_gone()}"
    return f"ended with status {status}"


def _fork_server_is_gone() -> str:
    """Return the cause that is given where the fork server does not answer."""
    return "the process that forks the workers (Python's multiprocessing.forkserver) was killed, perhaps out of memory"


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of a whole process on which results depend, to be the same in a child.

    A child does not run the main module, which may have made them.
    """

    environment: dict[str, str]
    dtype: torch.dtype
    matmul_precision: str
    is_deterministic: bool
    warns_only: bool
    log_level: int

    @classmethod
    def capture(cls) -> Self:
        """Return those of this process."""
        return cls(
            dict(os.environ),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            LOG.getEffectiveLevel(),
        )

    def apply(self) -> None:
        """Make them those of this process."""
        os.environ.clear()
        os.environ.update(self.environment)
        LOG.setLevel(self.log_level)
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        if self.is_deterministic != torch.are_deterministic_algorithms_enabled():  # the call takes torch 2 s to import
            torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.warns_only)


def init_child() -> None:
    """Prepare a child process: ignore Ctrl-C, which reaches all processes of a terminal, and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _OfNoFile(ModuleType):
    """Stand-in for the main module that has all its names but comes from no file."""

    def __init__(self, main: ModuleType) -> None:
        super().__init__(main.__name__)
        self._main = main

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            raise AttributeError(name)
        return getattr(self._main, name)


@contextmanager
def without_main_module() -> Iterator[None]:
    """Let multiprocessing find a main module without a file, as in an interactive session: it imports none then."""
    with _main_module:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = _OfNoFile(main)
        try:
            yield
        finally:
            sys.modules["__main__"] = main
