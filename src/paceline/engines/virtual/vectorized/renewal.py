"""Nobody ever waits and nothing is dropped: each worker delivers one gradient after the other, whoever else does."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from paceline.clusters.simulated import TILE, Cluster
from paceline.engines.virtual.vectorized.accounting import Observer, VectorizedAccounting
from paceline.engines.virtual.vectorized.sampling import Floats, Ints, RoundTripSampler, event_order
from paceline.protocols.protocol import Protocol

ARRIVALS = 1 << 16  # about so many at once, or one a worker
BISECTION = (64, 32, 16, 8, 4, 2, 1)


@dataclass
class Arrivals:
    """All that arrive in some time, each worker's in order.

    Attributes:
        worker: of each arrival.
        due_s: when it is at the server.
        parent: index of the worker's arrival before, or -1 if that is not among these.
    """

    worker: Ints
    due_s: Floats
    parent: Ints

    def __getitem__(self, chosen: Ints) -> Arrivals:
        """Return some of them, with the parents of each."""
        place = np.full(len(self.parent) + 1, -1)  # the last one for those without parent
        place[chosen] = np.arange(len(chosen))
        return Arrivals(self.worker[chosen], self.due_s[chosen], place[self.parent[chosen]])


class Calendar:
    """When each worker's next arrivals are, as if it never waited: rows of 64 draws, one after the other.

    Args:
        draws: round-trip times.
        workers: n.
    """

    def __init__(self, draws: RoundTripSampler, workers: int) -> None:
        self._sampler = draws
        self._row_s = np.zeros((workers, TILE + 1))  # when the draw before began to be computed on, and 64 arrivals
        self._flat_s = self._row_s.reshape(-1)
        self._row = np.arange(workers) * (TILE + 1)  # where each row begins
        self._next = np.ones(workers, np.int64)  # place of the next arrival in its row
        self._tile = np.full(workers, -1)
        self._turn(np.arange(workers))

    def next_s(self) -> Floats:
        """Return the next arrival of each worker."""
        found: Floats = self._flat_s[self._row + self._next]
        return found

    def until(self, horizon_s: float, enough: int) -> tuple[Arrivals, float]:
        """Take out all arrivals until the horizon, not before the next one, or until some moment before it.

        Args:
            horizon_s: seconds.
            enough: arrivals, of which not many more are to be taken out.

        Returns:
            The arrivals, and until when they are all.
        """
        worker = np.flatnonzero(self.next_s() <= horizon_s)
        latest = np.full(len(self._row), -1)  # index of each worker's latest arrival among these
        parts, turned, before = [], [], 0
        while len(worker) and before <= enough:
            counts = self._counts(worker, horizon_s)
            ends = np.cumsum(counts)
            index = np.arange(ends[-1])
            firsts = ends - counts
            place = index + np.repeat(self._row[worker] + self._next[worker] - firsts, counts)
            parent = index + (before - 1)
            parent[firsts] = latest[worker]
            parts.append((np.repeat(worker, counts), self._flat_s[place], parent))
            latest[worker] = before + ends - 1
            before += len(index)
            self._next[worker] += counts
            worker = worker[self._next[worker] > TILE]
            turned.append((worker, self._row_s[worker]))
            self._turn(worker)
            worker = worker[self._row_s[worker, 1] <= horizon_s]
        arrivals = Arrivals(*(parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))))
        if not len(worker):
            return arrivals, horizon_s
        earlier_s = float(np.nextafter(self._row_s[worker, 1].min(), -inf))
        self._turn_back(turned, np.unique(arrivals.worker), earlier_s)
        return arrivals[np.flatnonzero(arrivals.due_s <= earlier_s)], earlier_s

    def _turn_back(self, turned: list[tuple[Ints, Floats]], workers: Ints, horizon_s: float) -> None:
        """Let all that is after an earlier horizon be still to come."""
        for worker, row_s in reversed(turned):
            is_late = row_s[:, TILE] > horizon_s
            self._row_s[worker[is_late]] = row_s[is_late]
            self._tile[worker[is_late]] -= 1
        self._next[workers] = 1
        self._next[workers] += self._counts(workers, horizon_s)

    def _counts(self, workers: Ints, horizon_s: float) -> Ints:
        """Return how many of the arrivals of a row are still to come, and do until the horizon, by bisection."""
        base = self._row[workers]
        last = np.zeros(len(workers), np.int64)
        for step in BISECTION:
            last += step * (self._flat_s[base + np.minimum(last + step, TILE)] <= horizon_s)
        return np.minimum(last, TILE) - self._next[workers] + 1

    def _turn(self, workers: Ints) -> None:
        """Go over to the next 64 draws."""
        row_s = np.empty((len(workers), TILE + 1))
        row_s[:, 0] = self._row_s[workers, TILE]
        row_s[:, 1:] = self._sampler.rows_s(workers, self._tile[workers] + 1)
        # A sum from left to right is what a clock adds up, to the last bit.
        self._row_s[workers] = np.add.accumulate(row_s, axis=1)
        self._tile[workers] += 1
        self._next[workers] = 1


class Renewal:
    """Simulates the arrivals of many updates at once; the k-th, 2k-th, ... of them make the updates.

    The i-th arrival of all, from 1, enters update ``(i - 1) // k + 1``, and the work that its worker is given then is
    on version ``i // k``.

    Args:
        protocol: that accepts everything, and refills on arrival.
        cluster: whose times do not depend on the moment, and whose server takes no time.
        seed: of the run.
        payload_bytes: of the parameters, and of a gradient.
    """

    def __init__(self, protocol: Protocol, cluster: Cluster, seed: int, payload_bytes: float = 0) -> None:
        assert protocol.quorum != "all"
        self.accounting = VectorizedAccounting(cluster.n)
        self._n = cluster.n
        self._quorum = protocol.quorum
        self._calendar = Calendar(RoundTripSampler(cluster, seed, payload_bytes), cluster.n)
        # Number of the arrival at which each worker was given its work, below 1 at the beginning.
        self._given = np.arange(cluster.n) - cluster.n

    @staticmethod
    def takes(protocol: Protocol, cluster: Cluster) -> bool:
        """Return whether arrivals do not depend on updates."""
        accepts_all = protocol.max_staleness == inf and protocol.quorum != "all"
        return accepts_all and protocol.refill == "arrival" and cluster.server.update_s == 0

    def run(self, updates: int, observe: Observer | None = None) -> None:
        """Make so many updates."""
        accounting, total = self.accounting, updates * self._quorum
        reporter = UpdateObserver(self._quorum, observe) if observe is not None else None
        horizon_s = float(self._calendar.next_s().min())
        while accounting.pushes < total:
            left = total - accounting.pushes
            arrivals, until_s = self._calendar.until(horizon_s, 4 * max(ARRIVALS, self._n))
            order, staleness = self._number(arrivals)
            if len(order) >= left:
                order, staleness = order[:left], staleness[:left]
                arrivals = arrivals[order]
                until_s = float(arrivals.due_s[-1])
                order = np.arange(left)
            accounting.use(staleness)
            if reporter is not None:
                reporter.report(arrivals.due_s[order], staleness)
            accounting.pushes += len(order)
            horizon_s = self._next_horizon_s(until_s, len(order), left)
            accounting.now = until_s
        accounting.updates = updates
        accounting.pulls = self._n + total - 1  # the run ends before the last one would be given work again

    def _next_horizon_s(self, until_s: float, arrived: int, left: int) -> float:
        """Return until when to go on: for so many arrivals as are handled well at once, at the rate of late."""
        wanted = min(max(ARRIVALS, self._n), 1.05 * left)
        horizon_s = until_s + (until_s - self.accounting.now) * min(2.0, wanted / arrived)
        return max(horizon_s, float(self._calendar.next_s().min()))

    def _number(self, arrivals: Arrivals) -> tuple[Ints, Ints]:
        """Return the order of the arrivals, which numbers them, and their staleness in that order."""
        given, parent = self._given[arrivals.worker], arrivals.parent
        order = event_order(np.arange(len(given)), arrivals.due_s, parent, given)
        number = np.empty(len(given), np.int64)
        number[order] = np.arange(1, len(given) + 1) + self.accounting.pushes
        given = np.where(parent < 0, given, number[parent])
        self._given[arrivals.worker] = number  # of several values for a worker the last one is kept, its latest
        staleness = (number - 1) // self._quorum - np.maximum(given, 0) // self._quorum
        return order, staleness[order]


class UpdateObserver:
    """Tells of updates one by one.

    Args:
        quorum: gradients of an update.
        observe: hears of it.
    """

    def __init__(self, quorum: int, observe: Observer) -> None:
        self._quorum = quorum
        self._observe = observe
        self._held = np.zeros(0, np.int64)

    def report(self, times_s: Floats, staleness: Ints) -> None:
        """Take in arrivals, and tell of the updates that they make."""
        k, held = self._quorum, len(self._held)
        staleness = np.concatenate([self._held, staleness])
        whole = len(staleness) // k * k
        for begin in range(0, whole, k):
            self._observe(float(times_s[begin + k - 1 - held]), staleness[begin : begin + k])
        self._held = staleness[whole:]
