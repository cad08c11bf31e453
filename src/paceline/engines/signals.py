"""Ctrl-C and SIGTERM as something that an engine can look at and wait for."""

from __future__ import annotations

import os
import signal
import threading
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
