"""Simulated workers of a parameter server: a discrete-event simulation of their times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from math import inf
from operator import itemgetter
from typing import Any, ClassVar

from paceline.clusters.faults import Fault
from paceline.clusters.simulated import Cluster, RoundTrip
from paceline.coordinator.coordinator import Coordinator
from paceline.core import events
from paceline.engines.loop import RunLoop
from paceline.engines.ports import Clock, Parameters, Workers
from paceline.engines.signals import Signals
from paceline.protocols.local_steps import LocalSteps
from paceline.recording.history import Totals
from paceline.utils.state_dict import Stateful, check_kind

NOT_A_WORKER = -1


class TimedWorkers(Stateful, Workers, Clock):
    """Simulated workers, and the clock of their run, which is that of events.

    `now` is the clock of the parameter server: an arrival is handled when the server is free.

    Args:
        cluster: workers and their times.
        seed: seed of the run, >= 0.
        payload_bytes: bytes of the parameters, and of a gradient, >= 0.
        local_steps: local steps of each worker's work; None for one gradient.
        keeps_times: whether arrivals have the parts of their round trips.

    Attributes:
        evaluation: function that returns the metrics of a version; None without parameters.
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
        self,
        cluster: Cluster,
        seed: int,
        payload_bytes: float = 0,
        local_steps: LocalSteps | None = None,
        *,
        keeps_times: bool = False,
    ) -> None:
        self.now = 0.0
        self.evaluation: Callable[[int], dict[str, float]] | None = None
        self._round_trips = cluster.round_trips(seed, payload_bytes)
        self._times: dict[int, RoundTrip] | None = {} if keeps_times else None  # of the newest task of each worker
        self._duration_s = self._kept_duration_s if keeps_times else self._round_trips.duration_s
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

    def loop(self) -> RunLoop:
        """Return the loop of a run without parameters."""
        return RunLoop(self, TimesOnly(), self, simulated=[self])

    # --- clock --------------------------------------------------------------------------------------------

    def begin(self, signals: Signals) -> None:
        """Do nothing: time passes from event to event."""

    def tick(self) -> None:
        """Do nothing, as `begin`."""

    def add(self, event: events.Event) -> None:
        """Schedule an event of this moment."""
        self._at(self.now, event)

    def set_timer(self, command: events.SetTimer) -> None:
        """Schedule a timer."""
        self._at(command.at_s, events.Timer(command.at_s))

    def stop(self) -> None:
        """Do nothing: there are no resources."""

    def next_event(self, on_idle: Callable[[], None]) -> events.Event:
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

    # --- workers ------------------------------------------------------------------------------------------

    def meet(self, coordinator: Coordinator) -> None:
        """Note the coordinator, on whose timeout depends when a worker that hangs is lost."""
        self._coordinator = coordinator

    def start(self, signals: Signals) -> bool:
        """Return True: there are no processes."""
        return True

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

    def restart(self, command: events.RestartWorker) -> None:
        """Do nothing: times belong to the number of a worker, so another process would be as slow."""

    def evaluate(self, command: events.Evaluate) -> None:
        """Evaluate the version, in zero virtual time; without parameters there is nothing to evaluate."""
        if self.evaluation is not None:
            self.add(events.Evaluated(self.now, command.version, self.evaluation(command.version)))

    def on_commands(self) -> None:
        """Do nothing, as `start`."""

    def save_after(self, draws: Mapping[int, int]) -> None:
        """Do nothing: the state of the simulation is saved as a whole."""

    def ended(self, command: events.EndRun) -> None:
        """Do nothing, as `start`."""

    def close(self, error: BaseException | None) -> None:
        """Do nothing, as `start`."""

    # --- accounts -----------------------------------------------------------------------------------------

    def started_s(self, worker: int) -> float:
        """Return when the newest task of a worker was begun."""
        return self._started_s[worker]

    def in_flight(self) -> Iterator[tuple[int, int]]:
        """Yield worker and draw of the tasks in flight, in the order of their arrivals."""
        for _, _, worker, draw in sorted(self._heap, key=itemgetter(0, 1)):
            if worker != NOT_A_WORKER and self._current[worker] == draw:
                yield worker, draw

    def accepted(self, command: events.Accept) -> None:
        """Count the newest task of a worker as useful."""
        self._useful_s += self.now - self._started_s[command.worker]

    def updating(self, command: events.Apply) -> None:
        """Count the gradients of an update, and advance the clock by the server's time."""
        totals = self._totals
        totals.updates += 1
        for gradient in command.gradients:
            totals.staleness[gradient.staleness] += 1
        self.now += self._update_s

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
        kept = {} if self._times is None else {"times": dict(self._times)}
        return {"totals": totals, **super().state_dict(), **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state of the same cluster."""
        self._totals = Totals(**state["totals"])
        super().load_state_dict({"steps": {}, **state})  # missing in early runs
        if self._times is not None:
            check_kind("times", state["times"], self._times)
            self._times = dict(state["times"])

    def _finish(self, worker: int) -> None:
        self._current[worker] = 0
        self._busy_s += self.now - self._started_s[worker]

    def _arrival(self, worker: int, draw: int) -> events.Arrival:
        self._arrivals += 1
        self._finish(worker)
        minibatches = self._steps.get(worker, 1)
        if self._times is None:
            return events.Arrival(self.now, worker, draw, minibatches=minibatches)
        return events.Arrival(self.now, worker, draw, minibatches=minibatches, **self._times[worker]._asdict())

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


class TimesOnly(Parameters):
    """Parameters of a simulation of times alone: none."""

    @property
    def not_finite(self) -> str:
        """Nothing."""
        return ""

    def resume_at(self, version: int) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def assigned(self, command: events.Compute) -> None:
        """Do nothing."""

    def cancelled(self, command: events.Interrupt) -> None:
        """Do nothing."""

    def lost(self, worker: int) -> None:
        """Do nothing."""

    def arrived(self, arrival: events.Arrival, coordinator: Coordinator) -> events.Arrival:
        """Return the arrival."""
        return arrival

    def accept(self, command: events.Accept) -> None:
        """Do nothing."""

    def apply(self, command: events.Apply) -> events.Step | None:
        """Return no step."""
        return None

    def accumulate(self) -> None:
        """Do nothing."""

    def check(self, now: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
