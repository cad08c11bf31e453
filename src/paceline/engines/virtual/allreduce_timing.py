"""Simulated workers without a server: the times of all-reduce iterations."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from heapq import heappop, heappush
from math import inf
from typing import Any, ClassVar

from paceline.clusters.faults import Fault
from paceline.clusters.simulated import Cluster
from paceline.core.events import Compute, Event
from paceline.engines.virtual.simulated_workers import NOT_A_WORKER, SimulatedWorkers
from paceline.protocols.allreduce import AllReduceConfig


class TimedAllReduce(SimulatedWorkers):
    """Simulated workers of an all-reduce, and the clock of their run.

    Worker i has its gradient at f_i; an all-reduce takes t seconds. An iteration ends at max(f_i) + t, and all workers
    continue from there. If sums overlap gradients, worker i contributes at h_i = max(f_i, end of the previous
    iteration) and continues from there; the sum begins at max(h_i), and the iteration ends when the sum that it awaits
    is complete, but not before max(h_i). Sums share the links: the bytes of one follow those of the one before, and
    only latencies run at the same time. An iteration that awaits no sum ends at max(f_i), and worker i continues from
    max(f_i, end of the previous iteration): no worker is more than one iteration ahead. Fragments of the model count as
    equally long.

    All gradients of an iteration arrive when it ends, ordered by worker, joining workers first. In an arrival,
    `compute_s` is the compute time, `pull_s` the exposed part of the sum that the previous iteration awaited, and the
    rest of the round trip was spent waiting for other workers. `sum_s` is the t of the previous iteration's sum,
    exposed or not, for traces; a trace does not tell its latency from its bytes, so all of it counts as bytes.

    Args:
        cluster: workers and their times; the network's times are those of the all-reduce, and there is no server.
        seed: seed of the run, >= 0.
        allreduce: payload and schedule of the sums.
        payload_bytes: bytes of the parameters, >= 0.

    Attributes:
        is_first: whether the newest gradient is the first of its iteration.

    Source: Rigazzi, "DC-S3GD", 2019, eq. (13) and (14), where all f_i are the same.
    """

    _saved = (
        *SimulatedWorkers._saved,
        "_free_s",
        "_lost",
        "_finished_s",
        "_compute_s",
        "_recorded_sum_s",
        "_awaited",
        "_awaited_since_s",
        "_iteration",
        "_summed_s",
        "_exposed_s",
        "_sum_before_s",
        "_links_free_s",
        "arriving",
        "sum_ends_s",
    )
    _defaults: ClassVar[Mapping[str, Any]] = {**SimulatedWorkers._defaults, "sum_ends_s": []}

    def __init__(self, cluster: Cluster, seed: int, allreduce: AllReduceConfig, payload_bytes: float = 0) -> None:
        super().__init__(cluster, seed, payload_bytes, update_s=0.0)
        self._allreduce = allreduce
        self._network = cluster.network
        self._payload_bytes = payload_bytes / allreduce.fragments
        self._free_s = [inf] * cluster.n  # from when each worker may compute; inf: from its next task
        self._lost: set[int] = set()
        self._finished_s: dict[int, float] = {}  # when each worker has its gradient; inf: never
        self._compute_s = [0.0] * cluster.n
        self._recorded_sum_s = [0.0] * cluster.n  # from a trace
        self._arriving: list[int] = []
        self.is_first = False
        self._awaited: list[int] = []
        self._awaited_since_s = 0.0  # since when these are awaited
        self._iteration = 0
        self._summed_s = 0.0
        self._sum_s = 0.0
        self._exposed_s = 0.0  # of the sum before the iteration whose gradients arrive
        self._sum_before_s = 0.0
        self._begins_s = 0.0  # when the sum of the current iteration begins, as known so far
        self._links_free_s = 0.0  # when the bytes of all sums so far have been sent
        self._sum_ends_s: list[tuple[int, float]] = []  # iteration and end of each sum that is not awaited yet

    @property
    def lost(self) -> Container[int]:
        """Workers that were lost, and have had no task since."""
        return self._lost

    @property
    def iteration(self) -> int:
        """Number of iterations that have ended."""
        return self._iteration

    def compute(self, command: Compute) -> None:
        """Start the task when the worker became free, which may be in the past."""
        worker, _, draw, *_ = command
        self.pulls += 1
        self._lost.discard(worker)
        self._current[worker] = draw
        self._started_s[worker] = self.now
        start_s = min(self._free_s[worker], self.now)
        self._compute_s[worker] = self._round_trips.times(worker, draw, start_s).compute_s
        self._recorded_sum_s[worker] = self._round_trips.sum_s(worker, draw, start_s)
        finished_s = start_s + self._compute_s[worker]
        fault = self._fault(worker)
        if fault is not None and fault.kind != "not_finite":
            self._sequence += 1
            heappush(self._heap, (finished_s, self._sequence, worker, draw))
        self._finished_s[worker] = inf if fault is not None and fault.kind == "hang" else finished_s

    def next_event(self, on_idle: Callable[[], None]) -> Event:
        """Return the next gradient of an ended iteration, or the next event before an iteration ends."""
        self.is_first = False
        while not self._arriving:
            if self.fired and (lost := self._lost_by_hanging()):
                return lost
            ends_s = self._ends_s()
            if self._heap and self._heap[0][0] <= ends_s:
                event = self._earliest()
                if event is not None:
                    return event
            elif ends_s < inf:
                self._end_iteration(ends_s)
            else:
                return self._no_workers()
        worker = self._arriving.pop(0)
        arrival = self._arrival(worker, self._current[worker], self._fault(worker))
        measured = arrival.measured._replace(compute_s=self._compute_s[worker])
        return arrival._replace(measured=measured, pull_s=self._exposed_s, sum_s=self._sum_before_s)

    def _fault(self, worker: int) -> Fault | None:
        return self._faults.get((worker, self._current[worker]))

    def _ends_s(self) -> float:
        """Return when the iteration ends, as known so far; inf if no worker is awaited."""
        awaited = [w for w in sorted(self._finished_s) if self._coordinator.would_accept(w, self._current[w])]
        if awaited != self._awaited:
            self._awaited = awaited
            self._awaited_since_s = self.now
        coming = self._arriving_workers()
        if not coming:
            return inf
        self._begins_s = last_s = max([self._awaited_since_s, *(self._finished_s[worker] for worker in coming)])
        iteration = self._iteration + 1
        is_summed = self._allreduce.begins_sum(iteration) and len(coming) == len(awaited)
        recorded_s = max(self._recorded_sum_s[worker] for worker in coming)
        sum_s = self._network.all_reduce_s(len(coming), self._payload_bytes) + recorded_s
        self._sum_s = sum_s if is_summed else 0.0
        begun = self._allreduce.awaited_sum(iteration)
        if begun == iteration:
            return last_s + self._sum_s
        return max([last_s, *(end_s for other, end_s in self._sum_ends_s if begun is not None and other <= begun)])

    def _arriving_workers(self) -> list[int]:
        """Return the awaited workers that do not hang; while one hangs, gradients arrive without a sum."""
        return [worker for worker in self._awaited if self._finished_s[worker] < inf]

    def _earliest(self) -> Event | None:
        at_s, _, worker, what = heappop(self._heap)
        if worker == NOT_A_WORKER:
            self.now = max(self.now, at_s)
            event: Event = what._replace(now=self.now)
            return event
        if self._current[worker] != what:
            return None
        self.now = max(self.now, at_s)
        self._free_s[worker] = inf
        self._lost.add(worker)
        return self._inject_fault(self._faults[worker, what])

    def _end_iteration(self, ends_s: float) -> None:
        self._iteration += 1
        self.is_first = True
        overlaps, before_s, coming = self._allreduce.overlaps, self._summed_s, self._arriving_workers()
        hidden_s = max(self._finished_s[worker] for worker in coming) if overlaps else -inf
        self._exposed_s = min(self._sum_before_s, max(0.0, before_s - hidden_s))
        self._sum_before_s = self._sum_s
        self._follow_sums(len(coming))
        all_wait = self._allreduce.begins_sum(self._iteration) and not overlaps
        for worker in coming:
            finished_s = self._finished_s.pop(worker)
            self._free_s[worker] = ends_s if all_wait else max(finished_s, before_s)
            if len(coming) < len(self._awaited):
                self._free_s[worker] = inf
        self._summed_s = self.now = ends_s
        newcomers = self._coordinator.joining  # an update that all others have contributed to does not wait for them
        self._arriving.extend(sorted(coming, key=lambda worker: worker not in newcomers))
        self._awaited = []

    def _follow_sums(self, workers: int) -> None:
        """Record when the sum of the iteration that ends will be complete; remove the sums that it has awaited."""
        if self._sum_s:
            latency_s = self._network.all_reduce_s(workers, 0.0)
            self._links_free_s = max(self._begins_s, self._links_free_s) + self._sum_s - latency_s
            self._sum_ends_s.append((self._iteration, self._links_free_s + latency_s))
        begun = self._allreduce.awaited_sum(self._iteration)
        while begun is not None and self._sum_ends_s and self._sum_ends_s[0][0] <= begun:
            self._sum_ends_s.pop(0)
