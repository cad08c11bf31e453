"""Numbers of a run that is under way, from its records."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from paceline.coordinator.updates import LATE_RETURN, PROBE, STALE
from paceline.core import records
from paceline.core.gradient import NOT_FINITE, SKIPPED
from paceline.recording.history import Totals
from paceline.recording.metrics.network_counters import NetworkCounters

ROUND_TRIP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
MAX_WORKERS = 1000  # with a label of their own
OTHER = "other"
DROPPED = {STALE: "stale", LATE_RETURN: "late", PROBE: "probe", NOT_FINITE: "not_finite", SKIPPED: "skipped"}


class Histogram:
    """Counts of observed values by bucket.

    Args:
        bounds: upper bounds of the buckets but the last, in ascending order.

    Attributes:
        counts: number of values in each bucket, one more than there are bounds.
        sum: sum of the values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class RunMeasurements:
    """Counts, latest values and histograms of a run; one thread adds records, and any thread may read.

    Args:
        network: counts of the connections of this process.

    Attributes:
        totals: counts of updates, gradients and samples.
        dropped: number of dropped gradients by reason.
        lost_workers: number of losses of a worker.
        live: numbers of the live workers.
        update: latest update; None before the first.
        updated_s: time of the latest update in seconds since 1970; 0 before the first.
        metrics: metrics of the latest evaluation.
        round_trips: round-trip times in seconds, by worker; those from `MAX_WORKERS` on are together in ``OTHER``.
        staleness: staleness of the used gradients, in versions.
    """

    def __init__(self, network: NetworkCounters) -> None:
        self.network = network
        self.totals = Totals()
        self.dropped = dict.fromkeys([*DROPPED.values(), OTHER], 0)
        self.lost_workers = 0
        self.live: set[int] = set()
        self.update: records.UpdateMade | None = None
        self.updated_s = 0.0
        self.metrics: Mapping[str, float] = {}
        self.round_trips: dict[str, Histogram] = {}
        self.staleness = Histogram(STALENESS)

    def add(self, record: records.Record) -> None:
        """Add a record."""
        self.totals.count(record)
        match record:
            case records.GradientArrived():
                self._add_gradient(record)
            case records.UpdateMade():
                self.update = record
            case records.VersionEvaluated():
                self.metrics = record.metrics
            case records.RunStarted() | records.RunResumed():
                self.live = set(range(record.workers))
            case records.WorkerJoined():
                self.live.add(record.worker)
            case records.WorkerLost():
                self.live.discard(record.worker)
                self.lost_workers += 1

    def _add_gradient(self, gradient: records.GradientArrived) -> None:
        worker = round_trip_label(gradient)
        if worker not in self.round_trips:
            self.round_trips[worker] = Histogram(ROUND_TRIP_S)
        self.round_trips[worker].observe(gradient.event_s - gradient.started_s)
        if gradient.used:
            self.staleness.observe(gradient.staleness)
        elif not gradient.crossed_interrupt:
            self.dropped[DROPPED.get(gradient.reason, OTHER)] += 1


def round_trip_label(gradient: records.GradientArrived) -> str:
    """Return the label of a gradient's worker."""
    return str(gradient.worker) if gradient.worker < MAX_WORKERS else OTHER
