"""Simulated workers of a parameter server: a discrete-event simulation of their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from operator import itemgetter

from paceline.clusters.faults import Fault
from paceline.clusters.simulated import Cluster, RoundTrip
from paceline.core import events
from paceline.engines.virtual.simulated_workers import NOT_A_WORKER, SimulatedWorkers
from paceline.protocols.local_steps import LocalSteps


class TimedWorkers(SimulatedWorkers):
    """Simulated workers of a parameter server, and the clock of their run.

    `now` is the clock of the parameter server: an arrival is handled when the server is free.

    Args:
        cluster: workers and their times.
        seed: seed of the run, >= 0.
        payload_bytes: bytes of the parameters, and of a gradient, >= 0.
        local_steps: local steps of each worker's work; None for one gradient.
        keeps_times: whether arrivals have the parts of their round trips.
    """

    _saved = (*SimulatedWorkers._saved, "times")

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        payload_bytes: float = 0,
        local_steps: LocalSteps | None = None,
        *,
        keeps_times: bool = False,
    ) -> None:
        super().__init__(cluster, seed, payload_bytes, cluster.server.update_s)
        self._times: dict[int, RoundTrip] | None = {} if keeps_times else None  # of the newest task of each worker
        self._duration_s = self._kept_duration_s if keeps_times else self._round_trips.duration_s
        self._local_steps = local_steps
        self._confirm = None if self._round_trips.is_certain else self._round_trips.confirm
        self._gradient_s = cluster.server.gradient_s
        self._are_independent = cluster.leases.is_independent

    def next_event(self, on_idle: Callable[[], None]) -> events.Event:
        """Return the earliest event that was not cancelled."""
        while True:
            if self.fired and (lost := self._lost_by_hanging()):
                return lost
            if not self._heap:
                return self._no_workers()
            at_s, _, worker, what = heappop(self._heap)
            if worker == NOT_A_WORKER:
                if at_s > self.now:
                    self.now = at_s
                event: events.Event = what._replace(now=self.now)
                return event
            if self._current[worker] != what:
                continue  # interrupted
            self.now = (at_s if at_s > self.now else self.now) + self._gradient_s
            fault = self._faults.get((worker, what)) if self._faults else None
            if fault is None or fault.kind == "not_finite":
                return self._measured(worker, what, fault)
            if (lost := self._inject_fault(fault)) is not None:
                return lost

    def compute(self, command: events.Compute) -> None:
        """Schedule the arrival of the gradient after a round trip."""
        worker, _, draw, minibatch, *_ = command
        self.pulls += 1
        self._current[worker] = draw
        self._started_s[worker] = self.now
        self._sequence += 1
        if self._local_steps is None:
            share, timed = 1.0, draw
            if minibatch is not None and minibatch.slices:
                share = minibatch.share
                timed = draw if self._are_independent else minibatch.slices[0].draw  # the same in all of an update
            at_s = self.now + self._duration_s(worker, timed, self.now, share)
        else:
            at_s = self.now + self._local_round_trip(command, self._local_steps).total_s
        heappush(self._heap, (at_s, self._sequence, worker, draw))

    def in_flight(self) -> Iterator[tuple[int, int]]:
        """Yield worker and draw of the tasks in flight, in the order of their arrivals."""
        for _, _, worker, draw in sorted(self._heap, key=itemgetter(0, 1)):
            if worker != NOT_A_WORKER and self._current[worker] == draw:
                yield worker, draw

    def _measured(self, worker: int, draw: int, fault: Fault | None) -> events.Arrival:
        if self._confirm is not None and fault is None:
            self._confirm(worker, draw, self._started_s[worker])
        arrival = self._arrival(worker, draw, fault)
        if self._times is None:
            return arrival
        times = self._times[worker]
        measured = arrival.measured._replace(compute_s=times.compute_s)
        return arrival._replace(measured=measured, pull_s=times.pull_s, push_s=times.push_s)

    def _kept_duration_s(self, worker: int, draw: int, start_s: float, share: float = 1.0) -> float:
        assert self._times is not None
        self._times[worker] = times = self._round_trips.times(worker, draw, start_s, share)
        return times.total_s

    def _local_round_trip(self, command: events.Compute, local_steps: LocalSteps) -> RoundTrip:
        worker, _, draw, minibatch, *_ = command
        most = local_steps.most if minibatch is None else minibatch.length
        times, self._steps[worker] = self._round_trips.local_steps(worker, draw, self.now, local_steps, most)
        if self._times is not None:
            self._times[worker] = times
        return times
