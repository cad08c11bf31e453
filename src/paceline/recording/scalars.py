"""Named scalars of updates and evaluations, for experiment trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline.core.records import Record, UpdateMade, VersionEvaluated
from paceline.recording.history import Totals, idle_share


class ScalarPoint(NamedTuple):
    """Scalars of one version.

    Attributes:
        version: number of the version, the step of trackers.
        time_s: time at which the version was made, in seconds on the clock of the run.
        values: scalars by name.
    """

    version: int
    time_s: float
    values: Mapping[str, float]


class Scalars:
    """Scalars of a run, from its records in their order."""

    def __init__(self) -> None:
        self._totals = Totals()

    def add(self, record: Record) -> None:
        """Count a record."""
        self._totals.count(record)

    def of(self, record: Record) -> ScalarPoint | None:
        """Return the scalars of an update or an evaluation that has been counted; None for another record."""
        match record:
            case UpdateMade():
                return ScalarPoint(record.version, record.now_s, self._of_update(record))
            case VersionEvaluated():
                metrics = {f"eval/{name}": value for name, value in record.metrics.items()}
                return ScalarPoint(record.version, record.published_s, metrics)
        return None

    def _of_update(self, update: UpdateMade) -> dict[str, float]:
        return {
            "train/loss": update.loss,
            "train/learning_rate": update.learning_rate,
            "train/workload": update.workload,
            "update/k": update.k,
            "update/staleness": update.staleness,
            "workers/idle_share": idle_share(update.busy_s, update.live_s),
            "gradients/dropped": self._totals.dropped,
            "gradients/interrupted": self._totals.interrupted,
        }
