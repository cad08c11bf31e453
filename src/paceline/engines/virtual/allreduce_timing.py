"""Workers without a server in virtual seconds: each iteration ends for all of them at once, when the sum is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from heapq import heappop, heappush
from math import inf
from typing import Any

from paceline.clusters.faults import Fault
from paceline.clusters.simulated import Cluster
from paceline.core.events import AbortRun, Compute, Event, Outcome
from paceline.engines.virtual.timing import NOT_A_WORKER, TimingEngine
from paceline.protocols.allreduce import AllReduceConfig
from paceline.utils.state_dict import restore, snapshot


class AllReduceTiming(TimingEngine):
    """Simulates when iterations end, without computing anything.

    With f_i when worker i has its gradient, and t the seconds of an all-reduce, an iteration ends at max(f_i) + t, and
    everybody goes on from there. If sums overlap gradients, a worker hands in at h_i = max(f_i, end of the iteration
    before) and goes on from there, and the iteration ends at max(h_i) + t. Without a sum it ends at max(f_i), and each
    goes on from max(f_i, end of the iteration before): nobody is further ahead than an iteration.

    All gradients of an iteration arrive when it ends, in the order of the workers, newcomers first: of a sum nobody has
    a part before all is there. What a worker computed is in `compute_s`; what it waited for the sum before, though
    every gradient was there, in `pull_s`; and what is left of the round trip it waited for others. The sum itself, t,
    is in `sum_s`, hidden or not, for a trace.

    Args:
        cluster: workers and their times; the network's are those of the all-reduce, and there is no server.
        seed: of the run.
        reduction: what is summed, and when.
        payload_bytes: of the parameters.

    Source: Rigazzi, "DC-S3GD", 2019, eq. (13) and (14), where all f_i are the same.
    """

    def __init__(self, cluster: Cluster, seed: int, reduction: AllReduceConfig, payload_bytes: float = 0) -> None:
        super().__init__(cluster, seed, payload_bytes)
        self._update_s = self._gradient_s = 0.0
        self._reduction = reduction
        self._network = cluster.network
        self._payload_bytes = payload_bytes
        self._free_s = [inf] * cluster.n  # from when each worker may compute; inf for when it is given work
        self._lost: set[int] = set()
        self._finished_s: dict[int, float] = {}  # when each worker has its gradient, inf for never
        self._compute_s = [0.0] * cluster.n
        self._recorded_sum_s = [0.0] * cluster.n  # by a trace
        self._arriving: deque[int] = deque()
        self._awaited: list[int] = []
        self._awaited_since_s = 0.0  # these and nobody else
        self._iteration = 0
        self._summed_s = 0.0
        self._sum_s = 0.0
        self._exposed_s = 0.0  # of the sum before the iteration whose gradients arrive
        self._sum_before_s = 0.0

    def compute(self, command: Compute) -> None:
        """Begin when the worker was free, which may be some time ago."""
        worker, _, draw, _ = command
        self.pulls += 1
        self._current[worker] = draw
        self._started_s[worker] = self.now
        begun_s = min(self._free_s[worker], self.now)
        self._compute_s[worker] = self._round_trips.times(worker, draw, begun_s).compute_s
        self._recorded_sum_s[worker] = self._round_trips.sum_s(worker, draw, begun_s)
        finished_s = begun_s + self._compute_s[worker]
        fault = self._fault(worker)
        if fault is not None and fault.kind != "not_finite":
            self._sequence += 1
            heappush(self._heap, (finished_s, self._sequence, worker, draw))
        self._finished_s[worker] = inf if fault is not None and fault.kind == "hang" else finished_s

    def next_event(self) -> Event:
        """Return the next gradient of an iteration that has ended, or what comes before the next end."""
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
                return AbortRun(self.now, Outcome.NO_WORKERS, "no live worker will ever deliver a gradient again")
        return self._arrived(self._arriving.popleft())

    def state_dict(self) -> dict[str, Any]:
        """Return what the workers are doing, too."""
        return {**super().state_dict(), **snapshot(self, _SAVED), "arriving": list(self._arriving)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state of the same cluster."""
        super().load_state_dict(state)
        restore(self, _SAVED, state)
        self._arriving = deque(state["arriving"])

    def _fault(self, worker: int) -> Fault | None:
        return self._faults.get((worker, self._current[worker]))

    def _ends_s(self) -> float:
        """Return when the iteration ends, as far as it is known; inf if nobody is awaited."""
        awaited = [w for w in sorted(self._finished_s) if self._coordinator.would_accept(w, self._current[w])]
        if awaited != self._awaited:
            self._awaited, self._awaited_since_s = awaited, self.now
        coming = self._coming()
        if not coming:
            return inf
        last_s = max(self._awaited_since_s, *(self._finished_s[worker] for worker in coming))
        is_summed = self._reduction.communicates(self._iteration + 1) and len(coming) == len(awaited)
        self._sum_s = self._seconds_of_sum(coming) if is_summed else 0.0
        return last_s + self._sum_s

    def _seconds_of_sum(self, workers: list[int]) -> float:
        recorded_s = max(self._recorded_sum_s[worker] for worker in workers)
        return self._network.all_reduce_s(len(workers), self._payload_bytes) + recorded_s

    def _coming(self) -> list[int]:
        """Return who is awaited and does not hang; while somebody does, the gradients of the others arrive unsummed."""
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
        overlaps, before_s, coming = self._reduction.overlaps, self._summed_s, self._coming()
        hidden_s = max(self._finished_s[worker] for worker in coming) if overlaps else -inf
        self._exposed_s = min(self._sum_before_s, max(0.0, before_s - hidden_s))
        self._sum_before_s = self._sum_s
        communicates = self._reduction.communicates(self._iteration)
        for worker in coming:
            finished_s = self._finished_s.pop(worker)
            self._free_s[worker] = ends_s if communicates and not overlaps else max(finished_s, before_s)
            if len(coming) < len(self._awaited):
                self._free_s[worker] = inf
        self._summed_s = self.now = ends_s
        newcomers = self._coordinator.joining  # for whom no update waits, once the others are in it
        self._arriving.extend(sorted(coming, key=lambda worker: worker not in newcomers))
        self._awaited = []

    def _arrived(self, worker: int) -> Event:
        fault = self._fault(worker)
        if fault is not None:
            self.fired.append(fault)
        arrival = self._arrival(worker, self._current[worker])
        arrival = arrival._replace(compute_s=self._compute_s[worker], pull_s=self._exposed_s, sum_s=self._sum_before_s)
        return arrival._replace(finite=False) if fault is not None else arrival


_SAVED = (
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
)
