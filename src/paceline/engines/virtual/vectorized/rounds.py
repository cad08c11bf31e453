"""Round-by-round simulation: the arrivals of one update at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from paceline.clusters.simulated import Cluster
from paceline.engines.virtual.vectorized.accounting import Observer, VectorizedAccounting
from paceline.engines.virtual.vectorized.sampling import Floats, Ints, RoundTripSampler, event_order
from paceline.protocols.protocol import Protocol


@dataclass(kw_only=True)
class Pool:
    """Arrivals that may belong to an update: the next one of each worker, and its successors.

    Attributes:
        worker: worker of each arrival.
        due_s: virtual second of the arrival.
        start_s: virtual second at which the task started.
        parent: index of the worker's previous arrival in this pool, or -1.
        accepted: whether the gradient is fresh enough.
        draw: draw of the worker, counted from 0.
    """

    worker: Ints
    due_s: Floats
    start_s: Floats
    parent: Ints
    accepted: NDArray[np.bool_]
    draw: Ints

    @staticmethod
    def of(waves: list[Pool]) -> Pool:
        """Return the concatenation of several pools."""
        if len(waves) == 1:
            return waves[0]
        return Pool(**{name: np.concatenate([vars(wave)[name] for wave in waves]) for name in vars(waves[0])})


class Rounds:
    """Simulation of a protocol update by update; the cost grows with the workers and the arrivals of an update.

    The K-th accepted one of all workers' next arrivals is an upper bound on the time of the update. Workers with a new
    task before that bound may arrive again and lower it; this repeats until no such worker is left.

    Args:
        protocol: protocol without a bound on the lead.
        cluster: cluster with times independent of the virtual time, and no server time per gradient.
        seed: seed of the run, >= 0.
        payload_bytes: bytes of the parameters, and of a gradient, >= 0.
    """

    def __init__(self, protocol: Protocol, cluster: Cluster, seed: int, payload_bytes: float = 0) -> None:
        n = cluster.n
        self.accounting = VectorizedAccounting(n)
        self._all = protocol.quorum == "all"
        self._quorum = n if protocol.quorum == "all" else protocol.quorum
        self._max_staleness = protocol.max_staleness
        self._on_arrival = protocol.refill == "arrival"
        self._interrupts = protocol.on_update == "interrupt"
        self._drops = protocol.max_staleness < inf and not self._interrupts
        self._update_s = cluster.server.update_s
        self._sampler = RoundTripSampler(cluster, seed, payload_bytes)
        # Task of each worker.
        self._due_s = np.full(n, inf)
        self._start_s = np.zeros(n)
        self._on_version = np.zeros(n, np.int64)
        self._sequence = np.arange(n)
        self._next_sequence = n  # larger than all sequence numbers in use
        self._draw = np.full(n, -1)
        self._version = 0
        self._free_s = 0.0  # when the server has finished the latest update

    def run(self, updates: int, observe: Observer | None = None) -> None:
        """Simulate this number of updates."""
        self._give(np.arange(len(self._due_s)))
        for version in range(1, updates + 1):
            pool, bound_s = self._candidates()
            arrived = self._until_quorum(pool, bound_s)
            ended_s = np.maximum(pool.due_s[arrived], self._free_s)
            staleness = self._count(pool, arrived, ended_s)
            self._advance_tasks(pool, arrived)
            self._update(pool, arrived, ended_s, is_last=version == updates)
            if observe is not None:
                observe(self._free_s, staleness)

    # --- arrivals ---------------------------------------------------------------------------------------------

    def _candidates(self) -> tuple[Pool, float]:
        """Return all candidates for the quorum, and an upper bound on its time."""
        due_s = self._due_s
        if self._drops:
            is_fresh = self._on_version >= self._version - self._max_staleness
            bound_s = self._kth(due_s[is_fresh])
            worker = (due_s <= bound_s).nonzero()[0]
            accepted = is_fresh[worker]
        else:
            bound_s = self._kth(due_s)
            worker = (due_s <= bound_s).nonzero()[0]
            accepted = np.ones(len(worker), bool)
        waves = [
            Pool(
                worker=worker,
                due_s=due_s[worker],
                start_s=self._start_s[worker],
                parent=np.full(len(worker), -1),
                accepted=accepted,
                draw=self._draw[worker],
            )
        ]
        counted_s, before = waves[0].due_s[accepted], 0
        while len(parents := self._restarting(waves[-1], bound_s)):
            wave = self._following(waves[-1], parents, before)
            # Under "all" only the first accepted gradient of a worker counts.
            counts = ~waves[-1].accepted[parents] if self._all else slice(None)
            counted_s = np.concatenate([counted_s[counted_s <= bound_s], wave.due_s[counts]])
            bound_s = min(bound_s, self._kth(counted_s))
            before += len(waves[-1].worker)
            waves.append(wave)
        return Pool.of(waves), bound_s

    def _restarting(self, wave: Pool, bound_s: float) -> Ints:
        """Return the arrivals after which the worker is given work before the update."""
        is_early = wave.due_s <= bound_s
        return (is_early if self._on_arrival else is_early & ~wave.accepted).nonzero()[0]

    def _following(self, wave: Pool, parents: Ints, before: int) -> Pool:
        """Return the next arrivals of the same workers."""
        worker, draw = wave.worker[parents], wave.draw[parents] + 1
        start_s = np.maximum(wave.due_s[parents], self._free_s)
        due_s = start_s + self._sampler.durations_s(worker, draw)
        return Pool(
            worker=worker,
            due_s=due_s,
            start_s=start_s,
            parent=parents + before,
            accepted=np.ones(len(worker), bool),
            draw=draw,
        )

    def _kth(self, times_s: Floats) -> float:
        """Return the time at which the quorum is reached."""
        if len(times_s) < self._quorum:
            return inf
        return float(np.partition(times_s, self._quorum - 1)[self._quorum - 1])

    def _until_quorum(self, pool: Pool, bound_s: float) -> Ints:
        """Return the arrivals in order, up to the one that completes the quorum."""
        early = (pool.due_s <= bound_s).nonzero()[0]
        order = event_order(early, pool.due_s, pool.parent, self._sequence[pool.worker])
        counts = pool.accepted[order]
        if self._all:  # a worker's first accepted gradient
            parent = pool.parent[order]
            counts &= (parent < 0) | ~pool.accepted[parent]
        return order[: counts.nonzero()[0][self._quorum - 1] + 1]

    # --- gradients and updates ---------------------------------------------------------------------------------

    def _count(self, pool: Pool, arrived: Ints, ended_s: Floats) -> Ints:
        """Count gradients as used or dropped, and return the staleness of the used ones."""
        used = arrived
        if self._drops:
            is_used = pool.accepted[arrived]
            used, dropped = arrived[is_used], arrived[~is_used]
            self.accounting.wasted_s += float((ended_s[~is_used] - pool.start_s[dropped]).sum())
        staleness = self._version - self._on_version[pool.worker[used]]
        staleness[pool.parent[used] >= 0] = 0
        self.accounting.use(staleness)
        self.accounting.pushes += len(arrived)
        return staleness

    def _advance_tasks(self, pool: Pool, arrived: Ints) -> None:
        """Record the tasks that workers received before the update, and the workers that wait for it."""
        waiting = self._waiting(pool, arrived)
        self._draw[pool.worker[waiting]] = pool.draw[waiting]
        self.accounting.pulls += len(arrived) - len(waiting)
        if pool.parent[-1] < 0:
            return  # no worker has received one
        rank = np.full(len(pool.worker), -1)
        rank[arrived] = np.arange(len(arrived))
        rank[arrived[-1]] = -1  # its next task starts after the update
        after = (pool.parent >= 0).nonzero()[0]
        in_flight = after[(rank[after] < 0) & (rank[pool.parent[after]] >= 0)]
        worker = pool.worker[in_flight]
        self._due_s[worker] = pool.due_s[in_flight]
        self._start_s[worker] = pool.start_s[in_flight]
        self._draw[worker] = pool.draw[in_flight]
        self._on_version[worker] = self._version
        self._sequence[worker] = self._next_sequence + rank[pool.parent[in_flight]]
        self._next_sequence += len(arrived)

    def _waiting(self, pool: Pool, arrived: Ints) -> Ints:
        """Return the arrivals whose workers receive a task with the update, in order."""
        return arrived[-1:] if self._on_arrival else arrived[pool.accepted[arrived]]

    def _update(self, pool: Pool, arrived: Ints, ended_s: Floats, is_last: bool) -> None:
        """Make the update, and give tasks to the waiting and the interrupted workers."""
        accounting = self.accounting
        self._version += 1
        self._free_s = accounting.now = float(ended_s[-1]) + self._update_s
        accounting.updates += 1
        waited_s = self._free_s - (ended_s[-1:] if self._on_arrival else ended_s[pool.accepted[arrived]])
        accounting.idle_s += float(waited_s.sum())
        if is_last:
            return
        waiting = pool.worker[self._waiting(pool, arrived)]
        self._on_version[waiting] = self._version
        stale = self._interrupted() if self._interrupts else waiting[:0]
        self._number(waiting, stale)
        self._give(np.concatenate([waiting, stale]))

    def _interrupted(self) -> Ints:
        """Interrupt tasks that are too stale to be accepted, and return their workers."""
        stale = np.flatnonzero(self._on_version < self._version - self._max_staleness)
        self.accounting.interrupted += len(stale)
        self.accounting.wasted_s += float((self._free_s - self._start_s[stale]).sum())
        return stale

    # --- tasks ------------------------------------------------------------------------------------------------

    def _number(self, waiting: Ints, stale: Ints) -> None:
        """Assign sequence numbers to the tasks of waiting workers, then to those of interrupted ones."""
        if len(waiting) + len(stale) == len(self._sequence):  # all workers: no sorting needed
            self._sequence += len(waiting)
            self._sequence[waiting] = np.arange(len(waiting))
            self._next_sequence += len(waiting)
            return
        again = np.concatenate([waiting, stale[np.argsort(self._sequence[stale])]])
        self._sequence[again] = self._next_sequence + np.arange(len(again))
        self._next_sequence += len(again)

    def _give(self, workers: Ints) -> None:
        """Give these workers a task at the newest version."""
        self._draw[workers] += 1
        self._start_s[workers] = self._free_s
        self._on_version[workers] = self._version
        self._due_s[workers] = self._free_s + self._sampler.durations_s(workers, self._draw[workers])
        self.accounting.pulls += len(workers)
