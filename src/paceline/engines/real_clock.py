"""Clock of a run in real time: a queue of events, timers, and the files that are waited for."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

from paceline.core.events import Event, SetTimer, Timer
from paceline.engines.ports import Clock
from paceline.engines.signals import Signals


class RealClock(Clock):
    """Clock of a run whose workers are processes."""

    def __init__(self) -> None:
        self.now = 0.0
        self._begun_s = 0.0
        self._events: deque[Event] = deque()
        self._timers: list[float] = []
        self._failure: Exception | None = None
        self._selector = selectors.DefaultSelector()

    def begin(self, signals: Signals) -> None:
        """Start the clock at `now`."""
        self._begun_s = time.monotonic() - self.now

        def on_signal() -> None:
            self.unwatch(signals.reader)  # it stays readable
            self.add(signals.abort(self.now))

        self.watch(signals.reader, on_signal)

    @property
    def has_begun(self) -> bool:
        """Whether the run has begun."""
        return self._begun_s > 0

    @property
    def has_events(self) -> bool:
        """Whether events wait to be handled."""
        return bool(self._events)

    def elapsed_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._begun_s

    def tick(self) -> None:
        """Set `now` to the present time."""
        self.now = self.elapsed_s()

    def watch(self, file: Any, on_readable: Callable[[], None]) -> None:
        """Call a function, during a wait, whenever a file can be read."""
        self._selector.register(file, selectors.EVENT_READ, on_readable)

    def unwatch(self, file: Any) -> None:
        """Wait for a file no longer."""
        self._selector.unregister(file)

    def add(self, event: Event) -> None:
        """Add an event of this moment."""
        self._events.append(event)

    def replace(self, events: Iterable[Event]) -> None:
        """Replace all events by others."""
        self._events = deque(events)

    def read(self, timeout_s: float) -> None:
        """Read the files that can be read within a time."""
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def fail_after_events(self, failure: Exception) -> None:
        """Raise an error once all events have been returned."""
        self._failure = failure

    def set_timer(self, command: SetTimer) -> None:
        """Set a timer."""
        heappush(self._timers, command.at_s)

    def next_event(self, on_idle: Callable[[], None]) -> Event:
        """Return the next event, which is waited for."""
        while not self._events:
            if self._failure is not None:
                raise self._failure
            self._wait(on_idle)
        event = self._events.popleft()
        self.tick()  # in order, also for events that came during an update
        return event._replace(now=self.now)

    def _wait(self, on_idle: Callable[[], None]) -> None:
        ready = self._selector.select(timeout=0)
        now = self.elapsed_s()
        is_due = bool(self._timers) and self._timers[0] <= now
        if not ready and not is_due:
            on_idle()
            ready = self._selector.select(max(0.0, self._timers[0] - self.elapsed_s()) if self._timers else None)
        for key, _ in ready:
            key.data()
        if is_due:  # after what was read: no worker counts as silent while the server is busy
            until_s = self._timers[0]
            while self._timers and self._timers[0] <= until_s:
                heappop(self._timers)
                self._events.append(Timer(now))

    def stop(self) -> None:
        """Wait for no file any more."""
        self._selector.close()
