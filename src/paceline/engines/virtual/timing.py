"""Discrete-event simulation of a parameter server's timing, without gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from heapq import heappop, heappush
from math import inf
from typing import Any, ClassVar

from paceline.clusters.faults import Fault
from paceline.clusters.simulated import Cluster, RoundTrip
from paceline.core import events
from paceline.engines.base import Engine
from paceline.protocols.local_steps import LocalSteps
from paceline.recording.history import Totals
from paceline.utils.state_dict import Stateful

NOT_A_WORKER = -1


class TimingEngine(Stateful, Engine):
    """Discrete-event engine for times alone.

    `now` is the clock of the parameter server: an arrival is handled when the server is free.

    Args:
        cluster: workers and their times.
        seed: seed of the run, >= 0.
        payload_bytes: bytes of the parameters, and of a gradient, >= 0.
        local_steps: local steps of each worker's work; None for one gradient.

    Attributes:
        pulls: number of tasks.
        fired: scripted faults that have occurred.
    """

    # Pulls and useful seconds are not saved: only `simulate` uses them.
    _saved: ClassVar[tuple[str, ...]] = (
        "now",
        "_heap",
        "_sequence",
        "_current",
        "_started_s",
        "_busy_s",
        "_arrivals",
        "fired",
        "steps",
    )

    def __init__(
        self, cluster: Cluster, seed: int, payload_bytes: float = 0, local_steps: LocalSteps | None = None
    ) -> None:
        super().__init__()
        self._round_trips = cluster.round_trips(seed, payload_bytes)
        self._duration_s = self._round_trips.duration_s
        self._local_steps = local_steps
        self._steps: dict[int, int] = {}  # of the newest task of each worker that makes local steps
        self._confirm = None if self._round_trips.is_certain else self._round_trips.confirm
        self._gradient_s = cluster.server.gradient_s
        self._update_s = cluster.server.update_s
        self._heap: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._current = [0] * cluster.n  # draw that each worker is computing, 0 for none
        self._started_s = [0.0] * cluster.n
        self._busy_s = 0.0  # of ended tasks
        self._useful_s = 0.0
        self.pulls = 0
        self._arrivals = 0
        self._totals = Totals()
        self.fired: list[Fault] = []
        self._faults = {(fault.worker, fault.draw): fault for fault in cluster.faults}

    @property
    def wasted_s(self) -> float:
        """Worker-seconds of ended tasks without use: dropped, interrupted or lost."""
        return self._busy_s - self._useful_s

    @property
    def pushes(self) -> int:
        """Number of arrivals."""
        return self._arrivals

    def next_event(self) -> events.Event:
        """Return the earliest event that was not cancelled."""
        while True:
            if self.fired and (lost := self._lost_by_hanging()):
                return lost
            if not self._heap:
                return events.AbortRun(
                    self.now, events.Outcome.NO_WORKERS, "no live worker will deliver another gradient"
                )
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
            if self._confirm is not None and fault is None:
                self._confirm(worker, what, self._started_s[worker])
            arrived = self._arrival(worker, what) if fault is None else self._inject_fault(fault)
            if arrived is not None:
                return arrived

    def compute(self, command: events.Compute) -> None:
        """Schedule the arrival of the gradient after a round trip."""
        worker, _, draw, minibatch, *_ = command
        self.pulls += 1
        self._current[worker] = draw
        self._started_s[worker] = self.now
        self._sequence += 1
        if self._local_steps is None:
            share = 1.0 if minibatch is None else minibatch.share
            at_s = self.now + self._duration_s(worker, draw, self.now, share)
        else:
            at_s = self.now + self._local_round_trip(command, self._local_steps).total_s
        heappush(self._heap, (at_s, self._sequence, worker, draw))

    def interrupt(self, command: events.Interrupt) -> None:
        """Cancel the arrival."""
        self._totals.interrupted += 1
        self._finish(command.worker)

    def restart_worker(self, command: events.RestartWorker) -> None:
        """Do nothing: times belong to the number of a worker, so another process would be as slow."""

    def accept(self, command: events.Accept) -> None:
        """Count the task as useful."""
        self._useful_s += self.now - self._started_s[command.worker]

    def apply(self, command: events.Apply) -> None:
        """Count the gradients of the update, and advance the clock by the server's time."""
        totals = self._totals
        totals.updates += 1
        for gradient in command.gradients:
            totals.staleness[gradient.staleness] += 1
        self.now += self._update_s

    def evaluate(self, command: events.Evaluate) -> None:
        """Do nothing: there are no parameters."""

    def set_timer(self, command: events.SetTimer) -> None:
        """Schedule a timer."""
        self._at(command.at_s, events.Timer(command.at_s))

    def resume_at(self, version: int, now: float) -> None:
        """Start at this time."""
        self.now = now

    def totals(self) -> Totals:
        """Return the totals so far, with one sample per gradient."""
        totals = self._totals
        totals.used = totals.applied = totals.samples_used = totals.staleness.total()
        totals.dropped = self._arrivals - totals.used
        totals.samples_dropped = totals.dropped + totals.interrupted
        working_s = sum(self.now - self._started_s[worker] for worker, draw in enumerate(self._current) if draw)
        worker_s = len(self._current) * self.now
        totals.idle_share = 1 - (self._busy_s + working_s) / worker_s if worker_s else 0.0
        return totals

    def state_dict(self) -> dict[str, Any]:
        """Return the clock, the pending events and the tasks of the workers."""
        totals = vars(self._totals) | {"staleness": Counter(self._totals.staleness)}
        return {"totals": totals, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state of the same cluster."""
        self._totals = Totals(**state["totals"])
        super().load_state_dict({"steps": {}, **state})  # missing in early runs

    def _close(self, error: BaseException | None) -> None:
        """Do nothing: there are no processes."""

    def _finish(self, worker: int) -> None:
        self._current[worker] = 0
        self._busy_s += self.now - self._started_s[worker]

    def _arrival(self, worker: int, draw: int) -> events.Arrival:
        self._arrivals += 1
        self._finish(worker)
        return events.Arrival(self.now, worker, draw, minibatches=self._steps.get(worker, 1))

    def _local_round_trip(self, command: events.Compute, local_steps: LocalSteps) -> RoundTrip:
        worker, _, draw, minibatch, *_ = command
        most = local_steps.most if minibatch is None else minibatch.length
        times, self._steps[worker] = self._round_trips.local_steps(worker, draw, self.now, local_steps, most)
        return times

    def _at(self, at_s: float, event: events.Event) -> None:
        self._sequence += 1
        heappush(self._heap, (at_s, self._sequence, NOT_A_WORKER, event))

    def _inject_fault(self, fault: Fault) -> events.Event | None:
        self.fired.append(fault)
        if fault.kind == "hang":
            return None
        if fault.kind == "not_finite":
            return self._arrival(fault.worker, fault.draw)._replace(finite=False)
        if fault.back_after_s is not None:
            self._at(self.now + fault.back_after_s, events.Joined(self.now, fault.worker))
        return self._lose(fault, f"scripted fault at draw {fault.draw}")

    def _lost_by_hanging(self) -> events.Lost | None:
        """Return the loss of a hanging worker if no other worker computes and no timeout would detect it."""
        if self._coordinator.worker_timeout_s < inf or (self._heap and self._heap[0][0] <= self.now):
            return None
        hanging = {f.worker: f for f in self.fired if f.kind == "hang" and self._current[f.worker] == f.draw}
        if not hanging or any(draw and worker not in hanging for worker, draw in enumerate(self._current)):
            return None
        fault = next(iter(hanging.values()))
        return self._lose(fault, f"scripted fault: hangs since draw {fault.draw}, while no other worker computes")

    def _lose(self, fault: Fault, reason: str) -> events.Lost:
        self._finish(fault.worker)
        return events.Lost(self.now, fault.worker, reason)
