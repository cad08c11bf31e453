"""Nobody ever waits and nothing is dropped: each worker delivers one gradient after the other, whoever else does."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from paceline.cluster import Cluster
from paceline.engines.fleet.draws import Draws, Floats, Ints
from paceline.engines.fleet.order import in_order
from paceline.engines.fleet.tally import Observer, Silence, Tally
from paceline.protocols import Protocol

ARRIVALS = 1 << 16  # about so many at once, or one a worker


@dataclass
class Pool:
    """Arrivals of some time; those of one worker in order.

    Attributes:
        worker: of each arrival.
        due_s: when it is at the server.
        begun_s: when its work began.
        draw: that the worker computed, counted from 0.
        parent: index of the worker's arrival before in this pool, or -1.
    """

    worker: Ints
    due_s: Floats
    begun_s: Floats
    draw: Ints
    parent: Ints

    def __getitem__(self, chosen: Ints) -> Pool:
        """Return some of them, with the parents of each."""
        place = np.full(len(self.parent) + 1, -1)  # the last one for those without parent
        place[chosen] = np.arange(len(chosen))
        parent = place[self.parent[chosen]]
        return Pool(self.worker[chosen], self.due_s[chosen], self.begun_s[chosen], self.draw[chosen], parent)


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
        self.tally = Tally(cluster.n)
        self._n = cluster.n
        self._quorum = protocol.quorum
        self._draws = Draws(cluster, seed, payload_bytes)
        self._silence = Silence(0.0)
        # What each worker is computing.
        workers = np.arange(cluster.n)
        self._draw = np.zeros(cluster.n, np.int64)
        self._begun_s = np.zeros(cluster.n)
        self._due_s = self._draws.durations_s(workers, self._draw)
        self._given = workers - cluster.n  # number of the arrival at which it was given, below 1 at the beginning

    @staticmethod
    def takes(protocol: Protocol, cluster: Cluster) -> bool:
        """Return whether arrivals do not depend on updates."""
        accepts_all = protocol.max_staleness == inf and protocol.quorum != "all"
        return accepts_all and protocol.refill == "arrival" and cluster.server.update_s == 0

    def run(self, updates: int, observe: Observer | None = None) -> bool:
        """Make so many updates; return False as soon as a worker may count as lost."""
        tally, total = self.tally, updates * self._quorum
        teller = Teller(self._quorum, observe) if observe is not None else None
        horizon_s = float(self._due_s.min())
        while tally.pushes < total:
            left = total - tally.pushes
            most = int(min(max(ARRIVALS, self._n), 1.05 * left)) + 1
            pool, until_s = self._until(horizon_s, 2 * most)
            order, staleness = self._number(pool)
            if len(order) >= left:
                order, staleness = order[:left], staleness[:left]
                until_s = float(pool.due_s[order[-1]])
            times_s, begun_s = pool.due_s[order], pool.begun_s[order]
            if self._silence.is_too_long(until_s, times_s, begun_s, float(self._begun_s.min())):
                return False
            tally.use(staleness)
            if teller is not None:
                teller.tell(times_s, staleness)
            tally.pushes += len(order)
            horizon_s = until_s + (until_s - tally.now) * min(2.0, most / len(order))
            horizon_s = max(horizon_s, float(self._due_s.min()))
            tally.now = until_s
        tally.updates = updates
        tally.pulls = self._n + total - 1  # the run ends before the last one would be given work again
        return True

    def _until(self, horizon_s: float, most: int) -> tuple[Pool, float]:
        """Let work end, and give new work at once, until the horizon or an earlier moment.

        Args:
            horizon_s: not before the next arrival.
            most: arrivals that are enough to stop early.

        Returns:
            All arrivals until some moment, and that moment.
        """
        worker = np.flatnonzero(self._due_s <= horizon_s)
        wave = Pool(worker, self._due_s[worker], self._begun_s[worker], self._draw[worker], np.full(len(worker), -1))
        waves: list[Pool] = []
        count = 0
        while len(wave.worker):
            if count > most:
                horizon_s = float(np.nextafter(wave.due_s.min(), -inf))
                pool = self._wound_back(_joined(waves), horizon_s)
                return pool, horizon_s
            waves.append(wave)
            draw = wave.draw + 1
            due_s = wave.due_s + self._draws.durations_s(wave.worker, draw)
            self._due_s[wave.worker], self._begun_s[wave.worker], self._draw[wave.worker] = due_s, wave.due_s, draw
            again = np.flatnonzero(due_s <= horizon_s)
            wave = Pool(wave.worker[again], due_s[again], wave.due_s[again], draw[again], again + count)
            count += len(due_s)
        return _joined(waves), horizon_s

    def _wound_back(self, pool: Pool, horizon_s: float) -> Pool:
        """Let what is later than an earlier horizon be yet to come."""
        is_late = np.append(pool.due_s > horizon_s, False)  # the last one for those without parent
        first = np.flatnonzero(is_late[:-1] & ~is_late[pool.parent])
        worker = pool.worker[first]
        self._due_s[worker], self._begun_s[worker] = pool.due_s[first], pool.begun_s[first]
        self._draw[worker] = pool.draw[first]
        return pool[np.flatnonzero(~is_late[:-1])]

    def _number(self, pool: Pool) -> tuple[Ints, Ints]:
        """Return the order of the arrivals, which numbers them, and their staleness in that order."""
        given = self._given[pool.worker]
        order = in_order(np.arange(len(given)), pool.due_s, pool.parent, given)
        number = np.empty(len(given), np.int64)
        number[order] = np.arange(1, len(given) + 1) + self.tally.pushes
        later = np.flatnonzero(pool.parent >= 0)
        given[later] = number[pool.parent[later]]
        self._given[pool.worker] = number  # of several values for a worker the last one is kept, its latest
        staleness = (number - 1) // self._quorum - np.maximum(given, 0) // self._quorum
        return order, staleness[order]


class Teller:
    """Tells of updates one by one.

    Args:
        quorum: gradients of an update.
        observe: hears of it.
    """

    def __init__(self, quorum: int, observe: Observer) -> None:
        self._quorum = quorum
        self._observe = observe
        self._held = np.zeros(0, np.int64)

    def tell(self, times_s: Floats, staleness: Ints) -> None:
        """Take in arrivals, and tell of the updates that they make."""
        k, held = self._quorum, len(self._held)
        staleness = np.concatenate([self._held, staleness])
        whole = len(staleness) // k * k
        for begin in range(0, whole, k):
            self._observe(float(times_s[begin + k - 1 - held]), staleness[begin : begin + k])
        self._held = staleness[whole:]


def _joined(waves: list[Pool]) -> Pool:
    return Pool(*(np.concatenate(parts) for parts in zip(*(vars(wave).values() for wave in waves), strict=True)))
