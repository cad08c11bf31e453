"""The one extension point: what a run tells while it goes on."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.records import DecisionMade, GradientArrived, Record, RunEnded, UpdateMade, VersionEvaluated


class Callback:
    """Override what you want to hear of; every method gets one record.

    A callback may raise: the run then stops and the error reaches the caller.
    """

    def on_record(self, record: Record) -> None:
        """Hear everything; by default it is passed on to the methods below."""
        match record:
            case UpdateMade():
                self.on_update(record)
            case GradientArrived():
                self.on_arrival(record)
            case VersionEvaluated():
                self.on_evaluate(record)
            case DecisionMade(kind="protocol"):
                self.on_switch(record)
            case RunEnded():
                self.on_end(record)

    def on_resume(self, records: Iterable[Record]) -> None:
        """Hear what had happened before a run that goes on from a checkpoint."""

    def on_update(self, update: UpdateMade) -> None:
        """Hear of an update."""

    def on_arrival(self, arrival: GradientArrived) -> None:
        """Hear of a gradient that arrived, used or dropped."""

    def on_evaluate(self, evaluation: VersionEvaluated) -> None:
        """Hear of an evaluation."""

    def on_switch(self, decision: DecisionMade) -> None:
        """Hear that another protocol is in force."""

    def on_end(self, end: RunEnded) -> None:
        """Hear that the run is over."""


class Memory(Callback):
    """Keeps every record of a run that is not written down."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def on_record(self, record: Record) -> None:
        """Keep it."""
        self.records.append(record)
