"""Workers of rank 0, as its standby sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import (
    Accept,
    Apply,
    Compute,
    EndRun,
    Evaluate,
    Event,
    Interrupt,
    RestartWorker,
    SetTimer,
)
from paceline.engines.ports import Clock, Workers
from paceline.engines.signals import Signals


class NoMoreEvents(Exception):  # noqa: N818  # no error
    """All events are handled."""


class FollowedWorkers(Workers, Clock):
    """Workers of rank 0 as its standby sees them: events that have come, and nothing to do.

    Args:
        read: function that waits for a message of rank 0, and returns its events.

    Attributes:
        now: seconds since the run began, at the newest event.
    """

    def __init__(self, read: Callable[[], Iterator[Event]]) -> None:
        self.now = 0.0
        self._read = read
        self._events: Iterator[Event] = iter(())

    def next_event(self, on_idle: Callable[[], None] = lambda: None) -> Event:
        """Return the next event that rank 0 has handled."""
        while (event := next(self._events, None)) is None:
            self._events = self._read()
        self.now = event.now
        return event

    def replay(self, events: Iterable[Event]) -> None:
        """Return these events next, and raise `NoMoreEvents` after them."""

        def end() -> Iterator[Event]:
            raise NoMoreEvents

        self._events = iter(events)
        self._read = end

    def begin(self, signals: Signals) -> None:
        """Do nothing: time passes at rank 0."""

    def tick(self) -> None:
        """Do nothing, as `begin`."""

    def add(self, event: Event) -> None:
        """Do nothing: events come from rank 0."""

    def set_timer(self, command: SetTimer) -> None:
        """Do nothing: the timers ring at rank 0."""

    def stop(self) -> None:
        """Do nothing, as `begin`."""

    def meet(self, coordinator: Coordinator) -> None:
        """Do nothing: rank 0 gives its workers their tasks."""

    def start(self, signals: Signals) -> bool:
        """Return True, as `meet`."""
        return True

    def compute(self, command: Compute) -> None:
        """Do nothing, as `meet`."""

    def interrupt(self, command: Interrupt) -> None:
        """Do nothing, as `meet`."""

    def restart(self, command: RestartWorker) -> None:
        """Do nothing, as `meet`."""

    def evaluate(self, command: Evaluate) -> None:
        """Do nothing: the result comes from rank 0."""

    def accepted(self, command: Accept) -> None:
        """Do nothing, as `meet`."""

    def updating(self, command: Apply) -> None:
        """Do nothing, as `meet`."""

    def on_commands(self) -> None:
        """Do nothing, as `meet`."""

    def on_idle(self) -> None:
        """Do nothing, as `meet`."""

    def save_after(self, draws: Mapping[int, int]) -> None:
        """Do nothing, as `meet`."""

    def ended(self, command: EndRun) -> None:
        """Do nothing: rank 0 tells the workers."""

    def close(self, error: BaseException | None) -> None:
        """Do nothing, as `meet`."""
