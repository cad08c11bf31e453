"""Renewal simulation: workers never wait and nothing is dropped, so their arrivals are independent processes."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from paceline.clusters.simulated import TILE, Cluster
from paceline.engines.virtual.vectorized.accounting import Observer, VectorizedAccounting
from paceline.engines.virtual.vectorized.sampling import Floats, Ints, RoundTripSampler, event_order
from paceline.protocols.protocol import Protocol

ARRIVALS = 1 << 16  # about this number at once, or one per worker
BISECTION = (64, 32, 16, 8, 4, 2, 1)


@dataclass
class Arrivals:
    """Arrivals of a time window, in order for each worker.

    Attributes:
        worker: worker of each arrival.
        due_s: virtual second of the arrival.
        parent: index of the worker's previous arrival, or -1 if it is not in the window.
    """

    worker: Ints
    due_s: Floats
    parent: Ints

    def __getitem__(self, chosen: Ints) -> Arrivals:
        """Return these arrivals, with their parents renumbered."""
        index = np.full(len(self.parent) + 1, -1)  # the last entry is for arrivals without a parent
        index[chosen] = np.arange(len(chosen))
        return Arrivals(self.worker[chosen], self.due_s[chosen], index[self.parent[chosen]])


class ArrivalCalendar:
    """Next arrivals of each worker: rows of 64 draws, computed one after the other.

    Args:
        sampler: round-trip times.
        workers: number of workers, >= 1.
    """

    def __init__(self, sampler: RoundTripSampler, workers: int) -> None:
        self._sampler = sampler
        self._row_s = np.zeros((workers, TILE + 1))  # arrival of the previous draw, then 64 arrivals
        self._flat_s = self._row_s.reshape(-1)
        self._row = np.arange(workers) * (TILE + 1)  # start of each row in the flat array
        self._next = np.ones(workers, np.int64)  # column of the next arrival
        self._tile = np.full(workers, -1)
        self._next_row(np.arange(workers))

    def next_s(self) -> Floats:
        """Return the next arrival time of each worker."""
        found: Floats = self._flat_s[self._row + self._next]
        return found

    def until(self, horizon_s: float, enough: int) -> tuple[Arrivals, float]:
        """Remove and return all arrivals until the horizon, or until an earlier time.

        Args:
            horizon_s: virtual seconds, at least until the next arrival.
            enough: number of arrivals after which an earlier horizon is chosen.

        Returns:
            The arrivals, and the virtual second until which they are complete.
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
            self._next_row(worker)
            worker = worker[self._row_s[worker, 1] <= horizon_s]
        arrivals = Arrivals(*(parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))))
        if not len(worker):
            return arrivals, horizon_s
        # Just before, because arrivals at that very time may be incomplete.
        earlier_s = float(np.nextafter(self._row_s[worker, 1].min(), -inf))
        self._rewind(turned, np.unique(arrivals.worker), earlier_s)
        return arrivals[np.flatnonzero(arrivals.due_s <= earlier_s)], earlier_s

    def _rewind(self, turned: list[tuple[Ints, Floats]], workers: Ints, horizon_s: float) -> None:
        """Return the arrivals after an earlier horizon to the calendar."""
        for worker, row_s in reversed(turned):
            is_late = row_s[:, TILE] > horizon_s
            self._row_s[worker[is_late]] = row_s[is_late]
            self._tile[worker[is_late]] -= 1
        self._next[workers] = 1
        self._next[workers] += self._counts(workers, horizon_s)

    def _counts(self, workers: Ints, horizon_s: float) -> Ints:
        """Return the number of remaining arrivals of each row until the horizon, by bisection."""
        base = self._row[workers]
        last = np.zeros(len(workers), np.int64)
        for step in BISECTION:
            last += step * (self._flat_s[base + np.minimum(last + step, TILE)] <= horizon_s)
        return np.minimum(last, TILE) - self._next[workers] + 1

    def _next_row(self, workers: Ints) -> None:
        """Compute the next 64 draws."""
        row_s = np.empty((len(workers), TILE + 1))
        row_s[:, 0] = self._row_s[workers, TILE]
        row_s[:, 1:] = self._sampler.rows_s(workers, self._tile[workers] + 1)
        # A sum from left to right is bit-identical to the additions of a clock.
        self._row_s[workers] = np.add.accumulate(row_s, axis=1)
        self._tile[workers] += 1
        self._next[workers] = 1


class Renewal:
    """Simulation of the arrivals of many updates at once; the k-th, 2k-th, ... arrivals complete updates.

    The i-th arrival, from 1, enters update ``(i - 1) // k + 1``, and the next task of its worker is at version
    ``i // k``.

    Args:
        protocol: protocol that accepts all gradients and gives tasks on arrival.
        cluster: cluster with times independent of the virtual time, and no server time.
        seed: seed of the run, >= 0.
        payload_bytes: bytes of the parameters, and of a gradient, >= 0.
    """

    def __init__(self, protocol: Protocol, cluster: Cluster, seed: int, payload_bytes: float = 0) -> None:
        assert protocol.quorum != "all"
        self.accounting = VectorizedAccounting(cluster.n)
        self._n = cluster.n
        self._quorum = protocol.quorum
        self._calendar = ArrivalCalendar(RoundTripSampler(cluster, seed, payload_bytes), cluster.n)
        # Number of the arrival at which each worker received its task, below 1 at the start.
        self._task_since = np.arange(cluster.n) - cluster.n

    @staticmethod
    def takes(protocol: Protocol, cluster: Cluster) -> bool:
        """Return whether arrivals are independent of updates."""
        accepts_all = protocol.max_staleness == inf and protocol.quorum != "all"
        return accepts_all and protocol.refill == "arrival" and cluster.server.update_s == 0

    def run(self, updates: int, observe: Observer | None = None) -> None:
        """Simulate this number of updates."""
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
        accounting.pulls = self._n + total - 1  # the run ends before the last worker receives another task

    def _next_horizon_s(self, until_s: float, arrived: int, left: int) -> float:
        """Return the next horizon: time for a good number of arrivals at the latest rate."""
        wanted = min(max(ARRIVALS, self._n), 1.05 * left)
        horizon_s = until_s + (until_s - self.accounting.now) * min(2.0, wanted / arrived)
        return max(horizon_s, float(self._calendar.next_s().min()))

    def _number(self, arrivals: Arrivals) -> tuple[Ints, Ints]:
        """Return the order of the arrivals, and their staleness in that order."""
        given, parent = self._task_since[arrivals.worker], arrivals.parent
        order = event_order(np.arange(len(given)), arrivals.due_s, parent, given)
        number = np.empty(len(given), np.int64)
        number[order] = np.arange(1, len(given) + 1) + self.accounting.pushes
        given = np.where(parent < 0, given, number[parent])
        self._task_since[arrivals.worker] = number  # of several arrivals of a worker the latest is kept
        staleness = (number - 1) // self._quorum - np.maximum(given, 0) // self._quorum
        return order, staleness[order]


class UpdateObserver:
    """Splits a stream of arrivals into updates, and passes each update to a callback.

    Args:
        quorum: gradients of an update, >= 1.
        observe: callback for each update.
    """

    def __init__(self, quorum: int, observe: Observer) -> None:
        self._quorum = quorum
        self._observe = observe
        self._held = np.zeros(0, np.int64)

    def report(self, times_s: Floats, staleness: Ints) -> None:
        """Add arrivals, and report the updates that they complete."""
        k, held = self._quorum, len(self._held)
        staleness = np.concatenate([self._held, staleness])
        whole = len(staleness) // k * k
        for begin in range(0, whole, k):
            self._observe(float(times_s[begin + k - 1 - held]), staleness[begin : begin + k])
        self._held = staleness[whole:]
