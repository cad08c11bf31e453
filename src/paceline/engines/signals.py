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
        """Begin to listen, in the main thread, which alone may; take over a SIGTERM that was held."""
        self.reader, self._writer = os.pipe()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._catch)
            if _early.is_caught:
                _early.is_caught = False
                self._catch(signal.SIGTERM, None)

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


class _Early:
    """SIGTERM before an engine listens: the first one is held, the second one acts as usual."""

    def __init__(self) -> None:
        self.is_caught = False
        self._previous: Any = None

    def begin(self) -> bool:
        """Begin to hold; return whether this call has begun it."""
        if self._previous is not None or threading.current_thread() is not threading.main_thread():
            return False
        self._previous = signal.signal(signal.SIGTERM, self._catch) or signal.SIG_DFL
        return True

    def end(self) -> None:
        """Let SIGTERM act as usual again, also the one that was held."""
        if self._previous is None:
            return
        if signal.getsignal(signal.SIGTERM) == self._catch:
            signal.signal(signal.SIGTERM, self._previous)
        previous, self._previous = self._previous, None  # only now: until here the handler needs it
        if self.is_caught:
            self.is_caught = False
            signal.signal(signal.SIGTERM, previous)
            os.kill(os.getpid(), signal.SIGTERM)

    def _catch(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)
        self.is_caught = True


_early = _Early()


@contextmanager
def holding_sigterm(*, acts_at_end: bool = True) -> Iterator[None]:
    """Hold a SIGTERM that comes before an engine listens, as while torch is imported or a model is built.

    The next engine takes it over, so that its run is saved and ends as interrupted.

    Args:
        acts_at_end: whether SIGTERM acts as usual at the end if no engine has taken it over; not needed where the
            process ends then anyway.
    """
    has_begun = _early.begin()
    try:
        yield
    finally:
        if has_begun:
            _early.is_caught &= acts_at_end
            _early.end()


def release_sigterm() -> None:
    """Let SIGTERM act as usual from now on, also one that was held."""
    _early.end()


def is_sigterm_held() -> bool:
    """Return whether a SIGTERM was held that no engine has taken over."""
    return _early.is_caught


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
