"""Arrays over all workers, and over the leases of an update, on which compiled loops work."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from paceline.engines.virtual.vectorized.sampling import Floats, Ints

Rows = np.ndarray[Any, np.dtype[np.void]]

NONE = -1
HEAP, BUSY, ORDER, IDLE, COSTS_KNOWN, OLDEST_COST, ARRIVALS, PULLS, CANCELLED = range(9)  # in `Record.counts`
BUSY_S, USEFUL_S, LEASE_S = range(3)  # in `Record.sums`


WORKER = np.dtype(
    [
        ("number", np.int64),
        ("assigned_s", np.float64),
        ("begun_s", np.float64),
        ("work_s", np.float64),
        ("ended_s", np.float64),
        ("first_s", np.float64),
        ("samples", np.int32),
        ("copy", np.int32),
        ("ended_samples", np.int32),
        ("first_samples", np.int32),
    ],
    align=True,
)
"""Row of a worker, of 64 bytes: a lease that ends needs all of it, and an array for each field would miss the cache.

- number: number of its task, by which tasks that end at the same time are ordered; NONE without a task.
- assigned_s: time at which the coordinator has assigned the task.
- begun_s: time at which the task began.
- work_s: seconds of a whole minibatch in this update.
- ended_s: seconds of the leases of this update that have ended.
- first_s: seconds of the first one.
- samples: samples of the task.
- copy: worker with the same lease; NONE for none.
- ended_samples: samples of the leases of this update that have ended.
- first_samples: samples of the first one; 0 before its end.
"""


class Tasks(NamedTuple):
    """Tasks of all workers, and a heap of them.

    A task that is cancelled stays in the heap: an entry counts if it has the number of the task of its worker.

    Attributes:
        rows: row of each worker, see `WORKER`.
        idle_since: number by which idle workers are ordered, by worker.
        heap: numbers of the tasks, the earliest end first; number % n is the worker.
        heap_s: ends of these tasks.
    """

    rows: Rows
    idle_since: Ints
    heap: Ints
    heap_s: Floats


class Costs(NamedTuple):
    """Latest costs of a lease.

    Attributes:
        latest_s: costs, each in the place of the oldest one.
        ordered_s: the same in ascending order.
    """

    latest_s: Floats
    ordered_s: Floats


class Known(NamedTuple):
    """Latest seconds per sample of all workers, as `RestartingMedian` keeps them.

    Attributes:
        values: values in the window, in order of time, [worker, value].
        lengths: number of them.
        before: window before the latest value, if that was far.
        before_lengths: number of its values; 0 for none.
        jumps: counts of far values that lasted, and of single ones.
    """

    values: Floats
    lengths: Ints
    before: Floats
    before_lengths: Ints
    jumps: Ints


class Trips(NamedTuple):
    """Round trips of a run.

    Attributes:
        cost_s: seconds of a lease, whatever its samples.
        network_s: seconds of its transfers.
        size: samples of a whole minibatch.
    """

    cost_s: float
    network_s: float
    size: int


class Opening(NamedTuple):
    """Update that opens.

    Attributes:
        work_s: seconds of a whole minibatch, by worker.
        first: samples of the first lease, by worker.
        idle: workers, in the order in which they get it.
        left: samples that are dealt later.
        later: samples of a lease after the first one.
        repeats: whether a worker that finds nothing left repeats a lease.
        assigned_s: time of the event that opens it.
        begun_s: time at which the work begins, when the server has made the update before.
    """

    work_s: Floats
    first: Ints
    idle: Ints
    left: int
    later: int
    repeats: bool
    assigned_s: float
    begun_s: float


class Record(NamedTuple):
    """Counts and sums of a run, and what was cancelled in an update.

    Attributes:
        counts: numbers, see the constants of this module.
        sums: seconds, likewise.
        once: workers whose lease no other one had when they took it, the oldest first.
        taken: numbers of these tasks.
        workers: workers whose lease was cancelled.
        samples: samples of these leases.
        elapsed_s: seconds since their assignment.
    """

    counts: Ints
    sums: Floats
    once: Ints
    taken: Ints
    workers: Ints
    samples: Ints
    elapsed_s: Floats
