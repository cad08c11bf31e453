"""The one extension point: what a run tells while it goes on."""

from __future__ import annotations

from paceline.history import (
    DecisionMade,
    GradientArrived,
    Record,
    RunEnded,
    UpdateMade,
    VersionEvaluated,
)


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

    def on_update(self, update: UpdateMade) -> None:
        """An update was made."""

    def on_arrival(self, arrival: GradientArrived) -> None:
        """A gradient arrived, used or dropped."""

    def on_evaluate(self, evaluation: VersionEvaluated) -> None:
        """A version was evaluated."""

    def on_switch(self, decision: DecisionMade) -> None:
        """Another protocol is in force."""

    def on_end(self, end: RunEnded) -> None:
        """The run is over."""
