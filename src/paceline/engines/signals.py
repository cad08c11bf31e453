"""Handlers of Ctrl-C and SIGTERM: for engines, for processes that start up, and for workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.core.events import AbortRun, Outcome
from paceline.engines.notice_watch import NoticeWatch


class Signals:
    """Record of the first signal, or of a spot notice, which acts like one; the second signal acts as usual.

    Args:
        notice: source of spot notices, as in `Torchrun`; None for none.

    Attributes:
        caught: name of the signal, a spot notice in text, or the reason of `end_run`; empty before the first one.
        is_notice: whether a spot notice came first.
        end: outcome and reason that `end_run` was given first; None without.
        reader: file descriptor that becomes readable with the signal.
    """

    def __init__(self, notice: str | None = None) -> None:
        self.caught = ""
        self.is_notice = False
        self.end: tuple[Outcome, str] | None = None
        self.reader = self._writer = -1
        self._lock = threading.Lock()  # of the pipe, against `end_run`
        self._previous: dict[int, Any] = {}
        self._notice_watch = NoticeWatch(notice, self._on_notice)

    def install(self) -> None:
        """Install the handlers if this is the main thread; take over a SIGTERM that was held."""
        with self._lock:
            self.reader, self._writer = os.pipe()
            if self.caught:
                self._record(self.caught)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._catch)
            if _early.is_caught:
                _early.is_caught = False
                self._catch(signal.SIGTERM, None)
        self._notice_watch.start()

    def remove(self) -> None:
        """Restore the previous handlers."""
        self._notice_watch.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        with self._lock:
            os.close(self.reader)
            os.close(self._writer)
            self._writer = -1

    def end_run(self, outcome: Outcome, reason: str) -> None:
        """End the run from another thread, also before `install`; after the first signal it has no effect."""
        with self._lock:
            if not self.caught:
                self.end = outcome, reason
                self.caught = reason
                if self._writer >= 0:
                    self._record(reason)

    def abort(self, now_s: float) -> AbortRun:
        """Return the event of the signal that was caught, or of the end that another thread has requested."""
        outcome, reason = self.end or (Outcome.INTERRUPTED, f"interrupted by {self.caught}")
        return AbortRun(now_s, outcome, reason)

    def _on_notice(self, notice: str) -> None:
        self.is_notice = not self.caught
        self._record(notice)

    def _record(self, caught: str) -> None:
        self.caught = self.caught or caught
        os.write(self._writer, b"x")

    def _catch(self, number: int, frame: object) -> None:
        signal.signal(number, self._previous[number])
        self._record("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)


class _EarlySigterm:
    """SIGTERM before an engine has installed its handlers: the first is held, the second acts as usual."""

    def __init__(self) -> None:
        self.is_caught = False
        self._previous: Any = None

    def begin(self) -> bool:
        """Start to hold SIGTERM; return whether this call has started it."""
        if self._previous is not None or threading.current_thread() is not threading.main_thread():
            return False
        self._previous = signal.signal(signal.SIGTERM, self._catch) or signal.SIG_DFL
        return True

    def end(self) -> None:
        """Stop to hold SIGTERM, and send the one that was held."""
        if self._previous is None:
            return
        if signal.getsignal(signal.SIGTERM) == self._catch:
            signal.signal(signal.SIGTERM, self._previous)
        previous, self._previous = self._previous, None  # last, because the handler needs it
        if self.is_caught:
            self.is_caught = False
            signal.signal(signal.SIGTERM, previous)
            os.kill(os.getpid(), signal.SIGTERM)

    def _catch(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)
        self.is_caught = True


_early = _EarlySigterm()


@contextmanager
def holding_sigterm(*, acts_at_end: bool = True) -> Iterator[None]:
    """Hold a SIGTERM that comes before an engine handles it, as while torch is imported or a model is built.

    The next engine takes it over, so that its run is saved and ends as interrupted.

    Args:
        acts_at_end: whether a SIGTERM that no engine has taken over is sent at the end; False where the process
            exits anyway.
    """
    has_begun = _early.begin()
    try:
        yield
    finally:
        if has_begun:
            _early.is_caught &= acts_at_end
            _early.end()


def release_sigterm() -> None:
    """Stop to hold SIGTERM, and send the one that was held."""
    _early.end()


def is_sigterm_held() -> bool:
    """Return whether a SIGTERM is held that no engine has taken over."""
    return _early.is_caught


@contextmanager
def ignoring_ctrl_c() -> Iterator[None]:
    """Ignore Ctrl-C if this is the main thread: rank 0 ends all processes."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


@contextmanager
def leaving_on_sigterm(leave: Callable[[], None]) -> Iterator[None]:
    """Call a function at the first SIGTERM; the second one acts as usual. Ignore Ctrl-C: rank 0 ends all processes.

    Args:
        leave: function, which is called between any two instructions of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_sigterm(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        leave()

    before = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        with ignoring_ctrl_c():
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
