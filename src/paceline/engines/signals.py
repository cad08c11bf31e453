"""Ctrl-C and SIGTERM as something that an engine can look at and wait for, and a worker can leave by."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Signals:
    """Remembers the first signal; the second one acts as usual.

    Attributes:
        caught: the name of the signal, empty before there is one.
        reader: file descriptor that becomes readable with it.
    """

    def __init__(self) -> None:
        self.caught = ""
        self.reader = self._writer = -1
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Begin to listen, in the main thread, which alone may."""
        self.reader, self._writer = os.pipe()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._catch)

    def remove(self) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        os.close(self.reader)
        os.close(self._writer)

    def _catch(self, number: int, frame: object) -> None:
        signal.signal(number, self._previous[number])
        self.caught = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        os.write(self._writer, b"x")


@contextmanager
def leaving_on_sigterm(leave: Callable[[], None]) -> Iterator[None]:
    """Call something at the first SIGTERM, the second one acts as usual; leave Ctrl-C to rank 0, which ends everybody.

    Args:
        leave: may be called between any two instructions of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def heard(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        leave()

    before = signal.signal(signal.SIGTERM, heard), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
