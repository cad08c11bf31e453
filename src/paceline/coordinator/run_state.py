"""State that the parts of a coordinator share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from paceline.core.duration import Duration
from paceline.core.events import Command, Decision, EndRun, Evaluated, SetTimer
from paceline.utils.state_dict import Stateful


class RunState(Stateful):
    """Progress of a run, and the commands that answer the current event.

    Attributes:
        now: time of the latest event, in seconds since the run began.
        version: number of updates made.
        workload: number of gradients applied.
        update_size: number of gradients in the latest update.
        awaits_step: whether an update was made whose step is not known yet.
        stopped: whether the run has ended.
        cut_short: what the end of the run interrupted; a run that is resumed does it first.
        commands: answer to the current event.
    """

    _saved = ("now", "version", "workload", "update_size", "awaits_step", "stopped", "cut_short")
    __slots__ = (*_saved, "commands")

    def __init__(self) -> None:
        self.now = 0.0
        self.version = 0
        self.workload = 0
        self.update_size = 0
        self.awaits_step = False
        self.stopped = False
        self.cut_short: Literal["update", "timer"] | Evaluated | None = None
        self.commands: list[Command] = []

    def position(self, end: Duration) -> float:
        """Return how far the run is, in the unit of a duration."""
        return end.position(self.version, self.workload, self.now)

    def decide(
        self,
        kind: str,
        reason: str,
        worker: int | None = None,
        k: int | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        """Put a decision on record."""
        self.commands.append(Decision(kind=kind, reason=reason, worker=worker, k=k, numbers=numbers))

    def set_timer(self, at_s: float) -> None:
        """Ask for a timer event."""
        self.commands.append(SetTimer(at_s))

    def end(self, end: EndRun, cut_short: Literal["update", "timer"] | Evaluated | None = None) -> None:
        """End the run.

        Args:
            end: outcome and reason.
            cut_short: step that is left undone.
        """
        self.stopped = True
        self.cut_short = cut_short or self.cut_short
        self.commands.append(end)
