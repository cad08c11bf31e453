"""Arrays over all workers, and over the leases of an update, on which compiled loops work."""

from __future__ import annotations

from typing import NamedTuple

from paceline.engines.virtual.vectorized.sampling import Floats, Ints

NONE = -1
HEAP, ORDER, IDLE, COSTS_KNOWN, OLDEST_COST, ARRIVALS, PULLS, CANCELLED = range(8)  # in `Record.counts`
BUSY_S, USEFUL_S, LEASE_S = range(3)  # in `Record.sums`


class Tasks(NamedTuple):
    """Tasks of all workers, each array by worker.

    Attributes:
        due_s: end of the task in virtual seconds.
        order: number of the task, by which tasks that end at the same time are ordered.
        assigned_s: time at which the coordinator has assigned it.
        begun_s: time at which it began.
        samples: its samples.
        copy: worker with the same lease; NONE for none.
        place: place in the heap; NONE without a task.
        heap: workers with a task, the earliest end first.
        heap_s: ends of their tasks, in the order of the heap: to look them up by worker would miss the cache.
        idle_since: number by which idle workers are ordered.
    """

    due_s: Floats
    order: Ints
    assigned_s: Floats
    begun_s: Floats
    samples: Ints
    copy: Ints
    place: Ints
    heap: Ints
    heap_s: Floats
    idle_since: Ints


class Times(NamedTuple):
    """Times of the leases of the update in progress, each array by worker, and costs of leases.

    Attributes:
        samples: samples of the leases that have ended.
        seconds: their seconds.
        first_samples: samples of the first lease; 0 before its end.
        first_s: its seconds.
        costs_s: latest costs of a lease, each in the place of the oldest one.
        ordered_costs_s: the same in ascending order.
    """

    samples: Ints
    seconds: Floats
    first_samples: Ints
    first_s: Floats
    costs_s: Floats
    ordered_costs_s: Floats


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
    """Round trips of an update.

    Attributes:
        work_s: seconds of a whole minibatch, by worker.
        cost_s: seconds of a lease, whatever its samples.
        network_s: seconds of its transfers.
        size: samples of a whole minibatch.
    """

    work_s: Floats
    cost_s: float
    network_s: float
    size: int


class Opening(NamedTuple):
    """Update that opens.

    Attributes:
        first: samples of the first lease, by worker.
        idle: workers, in the order in which they get it.
        left: samples that are dealt later.
        repeats: whether a worker that finds nothing left repeats a lease.
        assigned_s: time of the event that opens it.
        begun_s: time at which the work begins, when the server has made the update before.
    """

    first: Ints
    idle: Ints
    left: int
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
