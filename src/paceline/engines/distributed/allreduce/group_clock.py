"""Clock of the ranks of a run without a server, whose events are the same on all of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from paceline.core.events import Event, SetTimer, Timer, UpdateApplied
from paceline.engines.ports import Clock
from paceline.engines.signals import Signals


class GroupClock(Clock):
    """Clock of one rank. All events up to a common time come in the same order on all ranks.

    Args:
        advance: function that runs until there is an event.

    Attributes:
        now: seconds since the run began; at rank 0 not before an update is made.
        common_s: time of the newest events, the same on all ranks.
        begun_s: beginning of the run on this host's monotonic clock.
        timers: times at which timers ring.
        applied: event of a measured step, which comes before all others; None for none.
    """

    def __init__(self, advance: Callable[[], None]) -> None:
        self.now = 0.0
        self.common_s = 0.0
        self.begun_s = 0.0
        self.timers: list[float] = []
        self.applied: UpdateApplied | None = None
        self._advance = advance
        self._events: deque[Event] = deque()

    def begin(self, signals: Signals) -> None:
        """Start the clock at `now`."""
        self.begun_s = time.monotonic() - self.now

    def elapsed_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self.begun_s

    def tick(self) -> None:
        """Do nothing: events have common times."""

    def add(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)

    def extend(self, events: Iterable[Event]) -> None:
        """Add events in their order."""
        self._events.extend(events)

    def clear(self) -> None:
        """Remove all events."""
        self._events.clear()

    def take(self) -> Event | None:
        """Remove and return the first event; None without any."""
        return self._events.popleft() if self._events else None

    def set_timer(self, command: SetTimer) -> None:
        """Set a timer."""
        heappush(self.timers, command.at_s)

    def ring(self, now: float) -> None:
        """Add the events of the timers up to a time."""
        while self.timers and self.timers[0] <= now:
            heappop(self.timers)
            self._events.append(Timer(now))

    def next_event(self, on_idle: Callable[[], None]) -> Event:
        """Return the next event, which is waited for."""
        applied, self.applied = self.applied, None
        if applied is not None:
            return applied
        while not self._events:
            self._advance()
        event = self._events.popleft()
        self.now = max(self.now, event.now)  # the clock of rank 0 already counts the sum
        return event

    def stop(self) -> None:
        """Do nothing: there are no resources."""
