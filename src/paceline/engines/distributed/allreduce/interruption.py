"""Interruption of one rank without a server: it ends alone, or with it the run of all ranks."""

from __future__ import annotations

from typing import Any

from paceline.core.events import Outcome
from paceline.engines.distributed.rank import Rank
from paceline.engines.signals import Signals


class Interruption:
    """Why this process is to end: a signal, the notice of a spot instance, or its loop.

    Args:
        rank: settings of this process.
        signals: signals that the process catches.
    """

    def __init__(self, rank: Rank, signals: Signals) -> None:
        self._lifecycle = rank.host.lifecycle
        self._cluster = rank.cluster
        self._signals = signals

    @property
    def reason(self) -> str:
        """Signal that this process has caught, or another reason why it leaves; empty if it stays."""
        return self._signals.caught or self._lifecycle.interruption

    @property
    def outcome(self) -> Outcome:
        """Outcome of a run that this process ends."""
        return Outcome.INTERRUPTED if self._signals.caught else self._lifecycle.outcome

    @property
    def in_report(self) -> dict[str, Any]:
        """Fields of a `StepReport` about the end of the run."""
        return {"interruption": self.ends_run, "outcome": self.outcome}

    @property
    def leaves_alone(self) -> bool:
        """Whether this process ends alone, as after the notice of a spot instance, and the others continue."""
        return self._cluster.is_elastic and not self._cluster.is_server and self.reason not in ("", "Ctrl-C")

    @property
    def ends_run(self) -> str:
        """Why this rank ends the run of all ranks; empty if it does not."""
        reason = self.reason  # read first, because a notice comes in another thread
        if not reason or self.leaves_alone:
            return ""
        if self.outcome is not Outcome.INTERRUPTED:
            return f"{'rank 0' if self._cluster.is_server else self._cluster.worker_name} has left the run: {reason}"
        return f"interrupted by {reason}{'' if self._cluster.is_server else f' at {self._cluster.worker_name}'}"
