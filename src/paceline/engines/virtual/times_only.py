"""Parameters of a simulation of times alone."""

from __future__ import annotations

from paceline.coordinator.coordinator import Coordinator
from paceline.core import events
from paceline.engines.ports import Parameters


class TimesOnly(Parameters):
    """Parameters of a simulation of times alone: none."""

    @property
    def not_finite(self) -> str:
        """Nothing."""
        return ""

    def resume_at(self, version: int) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def assigned(self, command: events.Compute) -> None:
        """Do nothing."""

    def cancelled(self, command: events.Interrupt) -> None:
        """Do nothing."""

    def lost(self, worker: int) -> None:
        """Do nothing."""

    def arrived(self, arrival: events.Arrival, coordinator: Coordinator) -> events.Arrival:
        """Return the arrival."""
        return arrival

    def accept(self, command: events.Accept) -> None:
        """Do nothing."""

    def apply(self, command: events.Apply) -> events.Step | None:
        """Return no step."""
        return None

    def gather(self) -> None:
        """Do nothing."""

    def accumulate(self) -> None:
        """Do nothing."""

    def check(self, now: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
