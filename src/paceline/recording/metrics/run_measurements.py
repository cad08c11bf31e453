"""Numbers of a run that is under way, from its records."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

from paceline.coordinator.admission import LATE_RETURN, PROBE, STALE
from paceline.core import records
from paceline.core.gradient import NOT_FINITE, NOTICE, OVERFLOW, SKIPPED
from paceline.recording.history import Totals
from paceline.recording.metrics.network_counters import NetworkCounters

ROUND_TRIP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
MAX_WORKERS = 1000  # with a label of their own
OTHER = "other"
DROPPED = {
    STALE: "stale",
    NOTICE: "stale",
    LATE_RETURN: "late",
    PROBE: "probe",
    NOT_FINITE: "not_finite",
    SKIPPED: "skipped",
    OVERFLOW: "skipped",
}


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

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value.

        Args:
            value: the value.
            times: number of times that it was observed, >= 0.
        """
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class RunMeasurements:
    """Counts, latest values and histograms of a run; one thread adds records, and any thread may read.

    Args:
        totals: counts of updates, gradients and samples, which the recorder keeps up to date.
        network: counts of the connections of this process.

    Attributes:
        dropped: number of dropped gradients by reason.
        lost_workers: number of losses of a worker.
        live: numbers of the live workers.
        update: latest update; None before the first.
        updated_s: time of the latest update in seconds since 1970; 0 before the first.
        metrics: metrics of the latest evaluation.
        round_trips: round-trip times in seconds, by worker; those from `MAX_WORKERS` on are together there.
    """

    def __init__(self, totals: Totals, network: NetworkCounters) -> None:
        self.totals = totals
        self.network = network
        self.dropped = dict.fromkeys([*DROPPED.values(), OTHER], 0)
        self.lost_workers = 0
        self.live: set[int] = set()
        self.update: records.UpdateMade | None = None
        self.updated_s = 0.0
        self.metrics: Mapping[str, float] = {}
        self.round_trips: defaultdict[int, Histogram] = defaultdict(lambda: Histogram(ROUND_TRIP_S))

    def add(self, record: records.Record) -> None:
        """Add a record."""
        if type(record) is records.GradientArrived:  # first, since most records are
            worker = record.worker if record.worker < MAX_WORKERS else MAX_WORKERS
            self.round_trips[worker].observe(record.event_s - record.started_s)
            if not record.used and not record.crossed_interrupt:
                self.dropped[DROPPED.get(record.reason, OTHER)] += 1
            return
        match record:
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

    @property
    def staleness(self) -> Histogram:
        """Staleness of the used gradients, in versions."""
        histogram = Histogram(STALENESS)
        for staleness, count in self.totals.staleness.copy().items():  # another thread counts meanwhile
            histogram.observe(staleness, count)
        return histogram


def worker_label(worker: int) -> str:
    """Return the label of a worker.

    >>> worker_label(7), worker_label(MAX_WORKERS)
    ('7', 'other')
    """
    return str(worker) if worker < MAX_WORKERS else OTHER
