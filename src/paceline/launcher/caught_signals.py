"""Signals to the launcher, and the ends of its child processes, as something to wait for."""

from __future__ import annotations

import signal
import socket
from collections import deque
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from paceline.clusters.launch_supervisor import OF_SCRIPTS

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *OF_SCRIPTS)


class CaughtSignals:
    """Signals that would end this process, which are kept until they are taken.

    A signal that this process ignores, as SIGHUP under nohup, stays ignored.

    Attributes:
        waker: socket that becomes readable with a signal, and with the end of a child process.
    """

    def __init__(self) -> None:
        self.waker, self._woken = socket.socketpair()
        self._caught: deque[int] = deque()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Install the handlers, in the main thread."""
        self.waker.setblocking(False)
        self._woken.setblocking(False)
        # A full buffer wakes the launcher as well.
        self._waker_before = signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        for number in CAUGHT:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._catch)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _wake)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers from before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._waker_before)
        self.waker.close()
        self._woken.close()

    def add(self, number: int) -> None:
        """Add a signal that this process was not sent."""
        self._caught.append(number)
        self._woken.send(b"\0")

    def take(self) -> list[int]:
        """Return the signals since the last call."""
        with suppress(BlockingIOError):
            while self.waker.recv(4096):
                pass
        return [self._caught.popleft() for _ in range(len(self._caught))]

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(number)


def _wake(number: int, frame: FrameType | None) -> None:
    """Do nothing: a signal with a handler writes to the waker."""
