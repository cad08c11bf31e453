"""Statistics of the workers: time and samples by fate, round-trip times, staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from paceline.policies.estimators.timeouts.loss_hazard import loss_hazards
from paceline.report.mean_grid import HEAT_COLUMNS, HeatMap
from paceline.report.run_data import FATES, Column, RunData

QUANTILES = (5, 25, 50, 75, 95, 100)  # percent
ROUNDING = 1e-9
IDLE = "idle"
ACTIVITIES = ("computing", "communicating", "waiting")


@dataclass(frozen=True, kw_only=True)
class TaskSums:
    """Sums over the tasks of a run, or over some of them.

    Attributes:
        spent_s: worker-seconds by fate of the task.
        samples: number of samples by fate of the task.
        computing_s: worker-seconds of computing; a task without a gradient counts as computing.
        communicating_s: worker-seconds of communicating. Under all-reduce it is the time of the sum that is not hidden
            behind computing.
    """

    spent_s: Column = field(default_factory=lambda: np.zeros(len(FATES)))
    samples: Column = field(default_factory=lambda: np.zeros(len(FATES)))
    computing_s: float = 0.0
    communicating_s: float = 0.0

    @classmethod
    def of(cls, work: Mapping[str, Column], fates: Column) -> TaskSums:
        """Return the sums over tasks.

        Args:
            work: columns of the tasks.
            fates: index in `FATES` of each task.
        """
        spent_s = work["end_s"] - work["start_s"]
        lost_s = np.sum(spent_s, where=np.isnan(work["compute_s"]))
        return cls(
            spent_s=np.bincount(fates, weights=spent_s, minlength=len(FATES)),
            samples=np.bincount(fates, weights=work["samples"], minlength=len(FATES)),
            computing_s=float(np.nansum(work["compute_s"]) + lost_s),
            communicating_s=float(np.nansum(work["network_s"])),
        )

    def plus(self, other: TaskSums) -> TaskSums:
        """Return the sums over the tasks of both."""
        return TaskSums(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def worker_seconds(self, live_s: float) -> dict[str, float]:
        """Return the worker-seconds by fate of the task, and the idle ones; their sum is the live time."""
        idle_s = max(0.0, live_s - float(self.spent_s.sum()))
        return {**dict(zip(FATES, self.spent_s.tolist(), strict=True)), IDLE: idle_s}

    def activities(self, live_s: float) -> dict[str, float]:
        """Return the worker-seconds of computing, communicating and waiting; their sum is the live time."""
        waiting_s = max(0.0, live_s - self.computing_s - self.communicating_s)
        return dict(zip(ACTIVITIES, (self.computing_s, self.communicating_s, waiting_s), strict=True))

    def samples_by_fate(self) -> dict[str, int]:
        """Return the number of samples by fate of the task; unfinished tasks are left out."""
        counts = zip(FATES, self.samples, strict=True)
        return {fate: int(count) for fate, count in counts if fate != "unfinished"}


def worker_seconds(run: RunData) -> dict[str, float]:
    """Return the worker-seconds by fate of the task, and the idle ones."""
    return TaskSums.of(run.work, run.fates).worker_seconds(sum(live_times(run)))


def activities(run: RunData) -> dict[str, float]:
    """Return the worker-seconds spent computing, communicating and waiting, for tasks of any fate."""
    return TaskSums.of(run.work, run.fates).activities(sum(live_times(run)))


def live_times(run: RunData) -> list[float]:
    """Return the live time of each worker, in seconds."""
    return [sum(end_s - begin_s for begin_s, end_s in spans) for spans in run.live]


class WorkerLosses(NamedTuple):
    """Losses of one worker.

    Attributes:
        worker: number of the worker.
        live_s: its live time in seconds.
        losses: number of times that it was lost.
        hazard: estimated losses per second of its live time.
    """

    worker: int
    live_s: float
    losses: int
    hazard: float


def worker_losses(losses: Sequence[int], live_s: Sequence[float]) -> list[WorkerLosses]:
    """Return the losses of the workers that were lost, the largest hazard first.

    Args:
        losses: number of losses of each worker.
        live_s: live time of each worker in seconds.
    """
    rows = map(WorkerLosses, range(len(losses)), live_s, losses, loss_hazards(losses, live_s))
    return sorted((row for row in rows if row.losses), key=lambda row: -row.hazard)


def samples(run: RunData) -> dict[str, int]:
    """Return the number of samples by fate of the task; unfinished tasks are left out."""
    return TaskSums.of(run.work, run.fates).samples_by_fate()


def staleness(run: RunData) -> dict[str, list[int]]:
    """Return the histogram of the staleness of the used gradients."""
    used = run.work["staleness"][run.fates == FATES.index("used")]
    found, counts = np.unique(used, return_counts=True)
    return {"staleness": found.tolist(), "gradients": counts.tolist()}


class RoundTripStats(NamedTuple):
    """Round-trip times of one worker.

    Attributes:
        quantiles_s: `QUANTILES` of the round-trip times, in seconds.
        known: number of known quantiles; the later ones are lower bounds, because tasks were interrupted or unfinished.
        finished: number of tasks whose gradient arrived.
    """

    quantiles_s: list[float]
    known: int
    finished: int


def round_trips(run: RunData) -> list[RoundTripStats | None]:
    """Return the round-trip times of each worker, None for a worker without tasks.

    The time of a task without a gradient is censored; the quantiles are those of the Kaplan-Meier estimate.

    Source: Kaplan and Meier, "Nonparametric estimation from incomplete observations", 1958.
    """
    seen_s = np.where(
        np.isnan(run.work["round_trip_s"]), run.work["end_s"] - run.work["start_s"], run.work["round_trip_s"]
    )
    finished, bounds = ~np.isnan(run.work["round_trip_s"]), _bounds(run.work["worker"], run.workers)
    return [_round_trips(seen_s[begin:end], finished[begin:end]) for begin, end in pairwise(bounds)]


def _round_trips(seen_s: Column, finished: Column) -> RoundTripStats | None:
    if not len(seen_s):
        return None
    count = int(finished.sum())
    if count == len(seen_s):
        return RoundTripStats(np.percentile(seen_s, QUANTILES).tolist(), len(QUANTILES), count)
    order = np.lexsort((~finished, seen_s))  # at equal times finished tasks come first
    at_risk = np.arange(len(seen_s), 0, -1)
    ended_by = 1 - np.cumprod(1 - finished[order] / at_risk)
    ranks = np.searchsorted(ended_by, np.array(QUANTILES) / 100 - ROUNDING)
    longest = len(seen_s) - 1
    quantiles_s = seen_s[order][np.minimum(ranks, longest)]
    return RoundTripStats(quantiles_s.tolist(), int((ranks <= longest).sum()), count)


def heat_map(run: RunData) -> HeatMap:
    """Return the mean compute time of each worker in equal slices of time, nan without an arrival.

    Waiting is left out, so a worker that waits for others does not look slow.
    """
    compute_s = run.work["compute_s"]
    measured = compute_s > 0
    values, worker, arrival_s = compute_s[measured], run.work["worker"][measured], run.work["end_s"][measured]
    columns = int(np.clip(len(values) / max(1, run.workers), 1, HEAT_COLUMNS))
    column = np.minimum((arrival_s / max(run.end_s, 1e-300) * columns).astype(int), columns - 1)
    cell = worker * columns + column
    counts = np.bincount(cell, minlength=run.workers * columns)
    sums = np.bincount(cell, weights=values, minlength=run.workers * columns)
    with np.errstate(invalid="ignore"):
        means = (sums / counts).reshape(run.workers, columns)
    return HeatMap(means, run.end_s)


def coverage(run: RunData, columns: int) -> Column:
    """Return the share of each slice of time that each worker spent on tasks of each fate.

    Returns:
        shares in [0, 1] of shape workers x fates x columns.
    """
    edges_s = np.linspace(0, run.end_s, columns + 1)
    shares = np.zeros((run.workers, len(FATES), columns))
    if run.end_s <= 0:
        return shares
    fates, bounds = run.fates, _bounds(run.work["worker"], run.workers)
    for worker in range(run.workers):
        rows = slice(bounds[worker], bounds[worker + 1])
        for fate in range(len(FATES)):
            chosen = fates[rows] == fate
            begin_s, end_s = run.work["start_s"][rows][chosen], run.work["end_s"][rows][chosen]
            shares[worker, fate] = np.diff(_covered(begin_s, end_s, edges_s)) / (edges_s[1] - edges_s[0])
    return shares


def _covered(begin_s: Column, end_s: Column, until_s: Column) -> Column:
    """Return the total length of the ordered intervals before each moment."""
    if not len(begin_s):
        return np.zeros_like(until_s)
    knots = np.stack([begin_s, end_s], axis=1).ravel()
    lengths = np.stack([np.zeros_like(begin_s), end_s - begin_s], axis=1).ravel()
    covered_s: Column = np.interp(until_s, knots, np.cumsum(lengths), left=0.0)
    return covered_s


def _bounds(worker: Column, workers: int) -> Column:
    """Return the index of the first task of each worker in the ordered tasks, and the number of tasks."""
    return np.searchsorted(worker, np.arange(workers + 1))
