"""Process of a rank, and all that it starts."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from math import inf
from typing import IO

import psutil

from paceline.utils.rank_logger import RankLogger
from paceline.utils.wording import listed

LOG = RankLogger(__name__)
END_TIMEOUT_S = 30.0  # for a rank to end on SIGTERM, as under torchrun, and for what it has started to end after it
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class Ending(Enum):
    """What is known of the end of a process."""

    NONE = auto()
    ASKED = auto()  # it, and all that it has started, is to end
    OVER = auto()


class RankProcess:
    """Process of a rank in a session of its own, which is killed when the launcher ends.

    Ctrl-C on the terminal reaches the launcher alone, which passes it on.

    Args:
        command: program and its arguments.
        environment: its environment.
        is_piped: whether its output is read from pipes; else it is that of the launcher.

    Attributes:
        ending: what is known of its end.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, is_piped: bool) -> None:
        where = subprocess.PIPE if is_piped else None
        self.ending = Ending.NONE
        self._kill_s = inf
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=where,
            stderr=where,
            start_new_session=True,
            preexec_fn=_ending_with(os.getpid()),
        )

    @property
    def pid(self) -> int:
        """Process id, which is also that of its session."""
        return self._process.pid

    @property
    def pipes(self) -> list[IO[bytes]]:
        """Pipes of its standard output and its standard error."""
        return [stream for stream in (self._process.stdout, self._process.stderr) if stream is not None]

    @property
    def status(self) -> int | None:
        """Exit status as of `subprocess`, None while the process runs."""
        return self._process.poll()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process, as SIGSTOP does."""
        if self._process.returncode is not None:
            return False
        with suppress(ChildProcessError):
            # WNOWAIT leaves the report where it is, so that the next look finds it too.
            return os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    @property
    def is_left(self) -> bool:
        """Whether the process, or one that it has started, is left."""
        group = self.pid
        with suppress(ChildProcessError):
            while os.waitpid(-group, os.WNOHANG)[0]:  # orphans, of which this process is the reaper
                pass
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        return True

    def send(self, number: int) -> None:
        """Send a signal to the process alone, which decides what becomes of what it has started.

        Ctrl-C goes to all of them, as from a terminal: what the process has started may have the run by now.
        """
        if number == signal.SIGINT and self.status is None:
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    def end(self, now: float) -> None:
        """Send SIGTERM to the process, and let all that it has started end within `END_TIMEOUT_S`."""
        self.ending = Ending.ASKED
        self._kill_s = now + END_TIMEOUT_S
        self.send(signal.SIGTERM)

    def has_ended(self, now: float) -> bool:
        """Return whether a process that is to end has ended, with all that it has started; kill what is late."""
        if now >= self._kill_s:
            self.kill()
        return self.status is not None and not self.is_left

    def kill(self) -> None:
        """Kill the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for the end of the process."""
        self._process.wait()


class Daemons:
    """Processes that ranks have started in sessions of their own, as daemons are.

    They are found below this process, which is the parent of every orphan within `reaping_orphans`, on Linux only.

    Attributes:
        ranks: process ids of the ranks so far, which are also those of their sessions.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self._others = {each.pid for each in psutil.Process().children(recursive=True)}
        self._kill_s = inf

    def end(self, now: float) -> None:
        """Send SIGTERM to all, and let them end within `END_TIMEOUT_S`."""
        self._kill_s = now + END_TIMEOUT_S
        if left := self._left():
            LOG.warning("what ranks have left as daemons ends with the run: %s", listed("process id", sorted(left)))
        self._send(signal.SIGTERM)

    def have_ended(self, now: float) -> bool:
        """Return whether none is left; kill what is late."""
        if now >= self._kill_s:
            self.kill()
        return not self._left()

    def kill(self) -> None:
        """Kill all."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for pid in self._left():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _left(self) -> list[int]:
        found = [each.pid for each in psutil.Process().children(recursive=True)]
        return [pid for pid in found if pid not in self._others and self._is_daemon(pid)]

    def _is_daemon(self, pid: int) -> bool:
        try:
            if os.getsid(pid) in self.ranks:
                return False
            return os.waitpid(pid, os.WNOHANG) == (0, 0)  # which reaps an orphan that has ended
        except ProcessLookupError:
            return False
        except ChildProcessError:  # another process is its parent
            return True


@contextmanager
def reaping_orphans() -> Iterator[None]:
    """Let this process wait for what a lost rank has started, on Linux; elsewhere process 1 may do so late or never."""
    if _PRCTL is None:
        yield
        return
    _PRCTL(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _PRCTL(PR_SET_CHILD_SUBREAPER, 0)


def _ending_with(launcher: int) -> Callable[[], None] | None:
    """Return a function that lets the process in which it is called be killed when the launcher ends (on Linux)."""
    if _PRCTL is None:
        return None
    prctl = _PRCTL

    def end_with_launcher() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it has ended meanwhile
            os.kill(os.getpid(), signal.SIGKILL)

    return end_with_launcher
