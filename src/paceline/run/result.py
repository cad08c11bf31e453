"""Result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from paceline.core.events import Outcome
from paceline.recording.history import History
from paceline.utils.representation import Representation


@dataclass(frozen=True, repr=False, kw_only=True)
class Result(Representation):
    """Result of a run.

    Attributes:
        model: trained model, on the CPU.
        history: records of the run.
        time_s: time on the run's clock, in seconds, of the version that met the stop condition.
        stopped_by: condition that ended the run.
        reason: reason for the end as a sentence.
        metrics: metrics of the last version on the evaluation data; empty without evaluation data.
        folder: folder of the run, on the host of rank 0; None if it was not recorded.
    """

    model: nn.Module
    history: History
    time_s: float
    stopped_by: Outcome
    reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    folder: Path | None = None

    def _facts(self) -> Mapping[str, object]:
        facts = {"stopped_by": self.stopped_by, "reason": self.reason, "time_s": self.time_s}
        return {**facts, **self.history.known_counts, **self.metrics, "folder": self.folder}
