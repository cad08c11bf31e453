"""Summary statistics of one run, from its records in one pass."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import nan
from typing import Any

from paceline.core import records
from paceline.core.events import Outcome
from paceline.core.stop import LEAST_LOSS_WINDOW, TARGETS, Stop
from paceline.recording.history import Totals, mean_loss


@dataclass(frozen=True, kw_only=True)
class RunStats:
    """Summary statistics of a run.

    Attributes:
        stopped_by: condition that ended the run; None for a run without an end.
        reason: reason for the end as a sentence.
        time_s: time on the run's clock, in seconds, of the version that met the stop condition.
        worker_s: worker-seconds of all live workers until then.
        updates: number of updates.
        used: number of accepted gradients, those of an unfinished update included.
        dropped: number of gradients that arrived and were not used.
        interrupted: number of interrupted tasks.
        samples_applied: number of samples in the used gradients.
        samples_dropped: number of samples in dropped gradients and interrupted tasks.
        mean_k: mean number of gradients per update.
        mean_staleness: mean staleness of the used gradients, in versions.
        max_staleness: largest staleness of a used gradient, in versions.
        idle_share: share of worker time spent idle, 0 to 1.
        loss: mean training loss of the last max(n, 10) used gradients, as in `Stop`.
        metrics: metrics of the latest evaluation; empty without one.
    """

    stopped_by: Outcome | None = None
    reason: str = ""
    time_s: float = 0.0
    worker_s: float = 0.0
    updates: int = 0
    used: int = 0
    dropped: int = 0
    interrupted: int = 0
    samples_applied: int = 0
    samples_dropped: int = 0
    mean_k: float = 0.0
    mean_staleness: float = 0.0
    max_staleness: int = 0
    idle_share: float = nan
    loss: float = nan
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def updates_per_s(self) -> float:
        """Updates per second of the run's clock."""
        return self.updates / self.time_s if self.time_s else nan

    def reached(self, stop: Stop) -> bool:
        """Return whether the run reached the target of the stop, or its end if the stop has no target."""
        if stop.targets:
            return self.stopped_by in TARGETS
        return self.stopped_by not in (None, Outcome.STOPPED, Outcome.INTERRUPTED) and not self.failed

    @property
    def failed(self) -> bool:
        """Whether the run failed."""
        return self.stopped_by is not None and self.stopped_by.is_failure

    @property
    def diverged(self) -> bool:
        """Whether the run ended because training diverged."""
        return self.stopped_by is not None and self.stopped_by.is_divergence

    def plain(self) -> dict[str, Any]:
        """Return the statistics by name."""
        return asdict(self)


def count(history: Iterable[records.Record]) -> RunStats:
    """Return the statistics of a run.

    Args:
        history: all records of the run in order.
    """
    counter = StatsCounter()
    for record in history:
        counter.take(record)
    return counter.stats()


class StatsCounter:
    """Accumulator of the statistics."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._losses: deque[float] = deque(maxlen=LEAST_LOSS_WINDOW)
        self._samples: deque[int] = deque(maxlen=LEAST_LOSS_WINDOW)
        self._live_s = array("d")  # worker-seconds at versions 1, 2, ...
        self._evaluations: deque[records.VersionEvaluated] = deque(maxlen=2)
        self._end: records.RunEnded | None = None
        self._now_s = 0.0

    def take(self, record: records.Record) -> None:
        """Add a record."""
        self.totals.count(record)
        self._now_s = record.now_s
        match record:
            case records.RunStarted() | records.RunResumed():
                self._losses = deque(self._losses, max(record.workers, LEAST_LOSS_WINDOW))
                self._samples = deque(self._samples, self._losses.maxlen)
                self._end = None
            case records.GradientArrived(used=True):
                self._losses.append(record.loss)
                self._samples.append(record.samples)
            case records.UpdateMade():
                self._live_s.append(record.live_s)
            case records.VersionEvaluated():
                self._evaluations.append(record)
            case records.RunEnded():
                self._end = record

    def stats(self) -> RunStats:
        """Return the statistics of the records so far."""
        totals = self.totals
        time_s, worker_s = self._reached()
        return RunStats(
            stopped_by=self._end.outcome if self._end else None,
            reason=self._end.reason if self._end else "",
            time_s=time_s,
            worker_s=worker_s,
            **totals.counts,
            samples_applied=totals.samples_used,
            samples_dropped=totals.samples_dropped,
            mean_k=totals.mean_k,
            mean_staleness=totals.mean_staleness,
            max_staleness=max(totals.staleness, default=0),
            idle_share=totals.idle_share,
            loss=mean_loss(self._losses, self._samples),
            metrics=dict(self._evaluations[-1].metrics) if self._evaluations else {},
        )

    def _reached(self) -> tuple[float, float]:
        """Return the time of the version that met the stop condition, and the worker-seconds until then."""
        if self._end is None:
            return self._now_s, self._live_s[-1] if self._live_s else 0.0
        if self._end.outcome not in TARGETS or self._end.outcome is Outcome.LOSS:
            return self._end.now_s, self._end.live_s
        reaching = self._evaluations[0]  # the last evaluation is that of the final version
        return reaching.published_s, self._live_s[reaching.version - 1] if reaching.version else 0.0
