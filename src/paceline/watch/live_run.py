"""Data of a run that is still going, of bounded size: recent tasks and updates, and sums over all earlier ones."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.core.records import Record, UpdateMade
from paceline.recording.run_folder import SavedRun
from paceline.recording.run_stats import StatsCounter
from paceline.report.curves import SWITCHES, mean_of_last
from paceline.report.mean_grid import HeatMap, MeanGrid
from paceline.report.run_data import (
    FATES,
    RATE,
    UPDATE,
    WORK,
    Column,
    RunData,
    RunReader,
    columns,
    loss_window,
    sorted_work,
)
from paceline.report.share_totals import ShareTotals, has_shares
from paceline.report.worker_stats import TaskSums, live_times
from paceline.watch.merged_points import MergedPoints

KEPT_TASKS = 100  # of each worker; a gradient of cancelled work arrives within so many tasks
KEPT_UPDATES = 1_000
KEPT_MARKS = 200
KEPT_SPANS = 20  # of each worker
KEPT_TEXTS = 500
AXES = ("time", "updates", "workload")


class Switch(NamedTuple):
    """Protocol switch or resumption, with its place on each axis."""

    time: float
    updates: int
    workload: int
    reason: str


class LiveRun:
    """Accumulator of the records of a run, of bounded size.

    The report's own reader gets all records. What it keeps beyond the recent past moves into sums and merged points.

    Args:
        run: reader of the folder of the run.

    Attributes:
        run: the same reader.
        progress: training loss, quorum and staleness of the updates.
        metrics: evaluation metrics by name.
        rates: learning-rate scale and phi of the rule "noise".
        first_protocol: reason for the first protocol, which names it.
        switches: the latest protocol switches and resumptions after it.
        marks: number of decisions and events of the whole run.
        updates: number of updates.
        latest: latest update; None before the first.
        shares: sums over the updates, if the workers share the samples; else None.
    """

    def __init__(self, run: SavedRun) -> None:
        self.run = run
        self.progress = MergedPoints(AXES, ("loss", "k", "staleness"))
        self.metrics: dict[str, MergedPoints] = {}
        self.rates = MergedPoints(AXES, ("scale", "phi"))
        self.first_protocol = ""
        self.switches: list[Switch] = []
        self.marks = 0
        self.updates = 0
        self.latest: UpdateMade | None = None
        self.shares = ShareTotals() if has_shares(run) else None
        self._reader = RunReader(self.shares)
        self._stats = StatsCounter()
        self._grid = MeanGrid()
        self._sums = TaskSums()  # over the tasks that are kept no longer
        self._tasks = np.zeros(0, int)  # number of these tasks of each worker
        self._used = np.zeros(0, int)  # number of them whose gradient was used
        self._live_s: defaultdict[int, float] = defaultdict(float)  # of each worker, in spans not kept
        self._seen_work = 0  # rows that are already in the summaries
        self._seen_marks = 0  # marks that are

    def add(self, records: Sequence[Record]) -> None:
        """Add the next records."""
        seen_updates = self.updates
        for record in records:
            self._reader.add(record)
            self._stats.take(record)
            if isinstance(record, UpdateMade):
                self.updates += 1
                self.latest = record
        self._summarize(self.updates - seen_updates)
        self._trim()

    def data(self) -> RunData:
        """Return recent tasks, updates and marks as data of a report, with the statistics of the whole run.

        There are at most `KEPT_TASKS` tasks of each worker.
        """
        self._trim_work()
        label = str(self.run.configuration.get("protocol", "?"))
        return self._reader.data(self.run, label, self._stats.stats())

    def sums(self, recent: RunData) -> TaskSums:
        """Return the sums over all tasks of the run."""
        return self._sums.plus(TaskSums.of(recent.work, recent.fates))

    def live_times(self, recent: RunData) -> list[float]:
        """Return the live time of each worker, in seconds."""
        return [self._live_s[worker] + live_s for worker, live_s in enumerate(live_times(recent))]

    def counts(self, recent: RunData) -> tuple[Column, Column]:
        """Return the number of tasks and of used gradients of each worker in the whole run."""
        tasks, used = _counts(recent.work, recent.fates, recent.workers)
        return _sum(self._tasks, tasks), _sum(self._used, used)

    def heat_map(self) -> HeatMap:
        """Return the mean compute times by worker and time over the whole run."""
        return self._grid.heat_map(len(self._reader.live))

    @property
    def received(self) -> int:
        """Number of gradients that have arrived; notices are none."""
        totals = self._stats.totals
        return totals.used + totals.dropped - totals.notices

    def staleness(self) -> dict[str, list[int]]:
        """Return the histogram of the staleness of all used gradients."""
        found = sorted(self._stats.totals.staleness.items())
        return {"staleness": [tau for tau, _ in found], "gradients": [count for _, count in found]}

    def _summarize(self, new_updates: int) -> None:
        reader = self._reader
        if new_updates:
            self._add_progress(columns(reader.updates[-new_updates * len(UPDATE) :], UPDATE))
        self._add_metrics()
        self._add_rates()
        new_marks = reader.marks[self._seen_marks :]
        self.marks += len(new_marks)
        chosen = [mark for mark in new_marks if mark.kind in SWITCHES]
        for mark in chosen:
            if not self.first_protocol:
                self.first_protocol = mark.reason
                continue
            switch = Switch(
                time=mark.time_s, updates=mark.updates, workload=self._workload(mark.updates), reason=mark.reason
            )
            self.switches.append(switch)
        work = columns(reader.work[self._seen_work * len(WORK) :], WORK)
        self._grid.add(work["worker"], work["end_s"], work["compute_s"])
        self._seen_marks = len(reader.marks)
        self._seen_work = len(reader.work) // len(WORK)

    def _add_progress(self, new: dict[str, Column]) -> None:
        ends = new["gradients"] - (self._reader.used - len(self._reader.losses))
        losses = mean_of_last(np.array(self._reader.losses), ends, loss_window(self.run))
        numbers = range(self.updates - len(ends) + 1, self.updates + 1)
        positions, values = (new["time_s"], numbers, new["workload"]), (losses, new["k"], new["mean_staleness"])
        for position, value in zip(zip(*positions, strict=True), zip(*values, strict=True), strict=True):
            self.progress.add(position, value)

    def _add_metrics(self) -> None:
        for evaluation in self._reader.evaluations:
            workload = self._workload(evaluation.version)
            for name, value in evaluation.metrics.items():
                points = self.metrics.setdefault(name, MergedPoints(AXES, ("value",)))
                points.add((evaluation.published_s, evaluation.version, workload), (value,))
        self._reader.evaluations.clear()

    def _add_rates(self) -> None:
        rates = columns(self._reader.rates, RATE)
        for time_s, number, scale, phi in zip(*rates.values(), strict=True):
            self.rates.add((time_s, number, self._workload(int(number))), (scale, phi))
        del self._reader.rates[:]

    def _workload(self, number: int) -> int:
        """Return the workload after an update; that of the earliest kept one if it was long ago."""
        kept = self._reader.updates
        count = len(kept) // len(UPDATE)
        at = min(max(number - (self.updates - count) - 1, 0), count - 1)
        return int(kept[at * len(UPDATE) + UPDATE.index("workload")]) if number and count else 0

    def _trim(self) -> None:
        reader = self._reader
        reader.losses = reader.losses[-loss_window(self.run) :]
        if len(reader.updates) > 2 * KEPT_UPDATES * len(UPDATE):
            reader.updates = reader.updates[-KEPT_UPDATES * len(UPDATE) :]
        del reader.marks[:-KEPT_MARKS], self.switches[:-KEPT_MARKS]
        self._seen_marks = len(reader.marks)
        self._trim_spans()
        if len(reader.work) > 2 * KEPT_TASKS * max(1, len(reader.live)) * len(WORK):
            self._trim_work()
        if len(reader.endings) > KEPT_TEXTS or len(reader.reasons) > KEPT_TEXTS + 4 * KEPT_UPDATES:
            reader.forget_unused_texts()

    def _trim_spans(self) -> None:
        for worker, spans in self._reader.live.items():
            self._live_s[worker] += sum(end_s - begin_s for begin_s, end_s in spans[:-KEPT_SPANS])
            del spans[:-KEPT_SPANS]

    def _trim_work(self) -> None:
        """Move all but the recent tasks into the sums."""
        work = sorted_work(columns(self._reader.work, WORK))
        ends = np.searchsorted(work["worker"], work["worker"], side="right")
        is_old = ends - np.arange(len(ends)) > KEPT_TASKS
        old = {name: column[is_old] for name, column in work.items()}
        endings = np.array([FATES.index(ending.fate) for ending in self._reader.endings], int)
        fates = endings[old["ending"]]
        self._sums = self._sums.plus(TaskSums.of(old, fates))
        tasks, used = _counts(old, fates, len(self._reader.live))
        self._tasks = _sum(self._tasks, tasks)
        self._used = _sum(self._used, used)
        kept = np.stack([work[name][~is_old] for name in WORK], axis=1)
        self._reader.work = array("d", kept.ravel().tolist())
        self._seen_work = len(kept)


def _counts(work: dict[str, Column], fates: Column, workers: int) -> tuple[Column, Column]:
    """Return the number of tasks and of used gradients of each worker."""
    used = work["worker"][fates == FATES.index("used")]
    return np.bincount(work["worker"], minlength=workers), np.bincount(used, minlength=workers)


def _sum(left: Column, right: Column) -> Column:
    """Return the sum of two columns; the shorter one is filled with zeros."""
    length = max(len(left), len(right))
    total: Column = np.pad(left, (0, length - len(left))) + np.pad(right, (0, length - len(right)))
    return total
