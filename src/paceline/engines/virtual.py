"""Discrete events in virtual seconds: the timing alone, or with real gradients at the right version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from math import inf, nan
from operator import itemgetter
from types import TracebackType
from typing import Any

from paceline.attributes import copied, restore
from paceline.cluster import Cluster, RoundTrip
from paceline.engines.base import Engine
from paceline.engines.forecast import Piece
from paceline.engines.replica import Measured, Replica
from paceline.engines.stale import compensated
from paceline.engines.versions import Versions
from paceline.events import (
    Accept,
    Apply,
    Arrival,
    Compute,
    Evaluate,
    Evaluated,
    Event,
    Interrupt,
    Joined,
    Lost,
    Minibatch,
    Outcome,
    Quit,
    Replace,
    Timer,
    Wake,
)
from paceline.faults import Fault
from paceline.history import Totals
from paceline.server import ParameterServer
from paceline.user_code import note_place

NOT_A_WORKER = -1


class TimingEngine(Engine):
    """Simulates when things happen, without computing anything.

    `now` is the parameter server's clock: an arrival is handled when the server is free.

    Args:
        cluster: workers and their times.
        seed: of the run.
        payload_bytes: of the parameters, and of a gradient.

    Attributes:
        pulls: pieces of work that were given.
    """

    def __init__(self, cluster: Cluster, seed: int, payload_bytes: float = 0) -> None:
        super().__init__()
        self._round_trips = cluster.round_trips(seed, payload_bytes)
        self._duration_s = self._round_trips.duration_s
        self._confirm = None if self._round_trips.is_certain else self._round_trips.confirm
        self._gradient_s = cluster.server.gradient_s
        self._update_s = cluster.server.update_s
        self._heap: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._current = [0] * cluster.n  # the draw each worker is computing
        self._started_s = [0.0] * cluster.n
        self._busy_s = 0.0  # of work that has ended
        self._useful_s = 0.0
        self.pulls = 0
        self._arrivals = 0
        self._totals = Totals()
        self.fired: list[Fault] = []
        self._faults = {(fault.worker, fault.draw): fault for fault in cluster.faults}

    @property
    def wasted_s(self) -> float:
        """Worker-seconds of work that ended without being of use: dropped, interrupted or lost."""
        return self._busy_s - self._useful_s

    @property
    def pushes(self) -> int:
        """Gradients that arrived."""
        return self._arrivals

    def next_event(self) -> Event:
        """Return the earliest event that still counts."""
        while True:
            if self.fired and (lost := self._lost_by_hanging()):
                return lost
            if not self._heap:
                return Quit(self.now, Outcome.NO_WORKERS, "no live worker will ever deliver a gradient again")
            at_s, _, worker, what = heappop(self._heap)
            if worker == NOT_A_WORKER:
                if at_s > self.now:
                    self.now = at_s
                event: Event = what._replace(now=self.now)
                return event
            if self._current[worker] != what:
                continue  # interrupted
            self.now = (at_s if at_s > self.now else self.now) + self._gradient_s
            fault = self._faults.get((worker, what)) if self._faults else None
            if self._confirm is not None and fault is None:
                self._confirm(worker, what, self._started_s[worker])
            arrived = self._arrival(worker, what) if fault is None else self._befall(fault)
            if arrived is not None:
                return arrived

    def compute(self, command: Compute) -> None:
        """Let the gradient arrive after a round trip."""
        worker, _, draw, _ = command
        self.pulls += 1
        self._current[worker] = draw
        self._started_s[worker] = self.now
        self._sequence += 1
        at_s = self.now + self._duration_s(worker, draw, self.now)
        heappush(self._heap, (at_s, self._sequence, worker, draw))

    def interrupt(self, command: Interrupt) -> None:
        """Forget the arrival that was to come."""
        self._totals.interrupted += 1
        self._finish(command.worker)

    def replace(self, command: Replace) -> None:
        """Keep it: the times belong to the worker's number, so another one would be as slow."""

    def accept(self, command: Accept) -> None:
        """Count its work as useful; the rest is left to `apply`."""
        self._useful_s += self.now - self._started_s[command.worker]

    def apply(self, command: Apply) -> None:
        """Count what the update is made of, and let the server be busy for its time."""
        totals = self._totals
        totals.updates += 1
        for gradient in command.gradients:
            totals.staleness[gradient.staleness] += 1
        self.now += self._update_s

    def evaluate(self, command: Evaluate) -> None:
        """Nothing to measure."""

    def wake(self, command: Wake) -> None:
        """Send a timer at that moment."""
        self._at(command.at_s, Timer(command.at_s))

    def go_on_from(self, version: int, now: float) -> None:
        """Begin at this time."""
        self.now = now

    def totals(self) -> Totals:
        """Return what happened so far; a sample stands for a gradient."""
        totals = self._totals
        totals.used = totals.applied = totals.samples_used = totals.staleness.total()
        totals.dropped = self._arrivals - totals.used
        totals.samples_dropped = totals.dropped + totals.interrupted
        working_s = sum(self.now - self._started_s[worker] for worker, draw in enumerate(self._current) if draw)
        worker_s = len(self._current) * self.now
        totals.idle_share = 1 - (self._busy_s + working_s) / worker_s if worker_s else 0.0
        return totals

    def state_dict(self) -> dict[str, Any]:
        """Return the clock, the events that are to come and what the workers are doing."""
        totals = vars(self._totals) | {"staleness": Counter(self._totals.staleness)}
        return {"totals": totals, **copied(self, _AS_IT_IS)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state of the same cluster."""
        self._totals = Totals(**state["totals"])
        restore(self, _AS_IT_IS, state)

    def _finish(self, worker: int) -> None:
        self._current[worker] = 0
        self._busy_s += self.now - self._started_s[worker]

    def _arrival(self, worker: int, draw: int) -> Arrival:
        self._arrivals += 1
        self._finish(worker)
        return Arrival(self.now, worker, draw)

    def _at(self, at_s: float, event: Event) -> None:
        self._sequence += 1
        heappush(self._heap, (at_s, self._sequence, NOT_A_WORKER, event))

    def _befall(self, fault: Fault) -> Event | None:
        self.fired.append(fault)
        if fault.kind == "hang":
            return None
        if fault.kind == "not_finite":
            return self._arrival(fault.worker, fault.draw)._replace(finite=False)
        if fault.back_after_s is not None:
            self._at(self.now + fault.back_after_s, Joined(self.now, fault.worker))
        return self._lose(fault, f"scripted fault at draw {fault.draw}")

    def _lost_by_hanging(self) -> Lost | None:
        """Return the loss of a worker that hangs if no other worker computes and no timeout would ever find it."""
        if self._coordinator.patience_s < inf or (self._heap and self._heap[0][0] <= self.now):
            return None
        hanging = {f.worker: f for f in self.fired if f.kind == "hang" and self._current[f.worker] == f.draw}
        if not hanging or any(draw and worker not in hanging for worker, draw in enumerate(self._current)):
            return None
        fault = next(iter(hanging.values()))
        return self._lose(fault, f"scripted fault: hangs since draw {fault.draw}, and no other worker computes")

    def _lose(self, fault: Fault, reason: str) -> Lost:
        self._finish(fault.worker)
        return Lost(self.now, fault.worker, reason)


# The part of the state that a checkpoint can hold as it is; pulls and useful seconds are for `simulate`, without any.
_AS_IT_IS = ("now", "_heap", "_sequence", "_current", "_started_s", "_busy_s", "_arrivals", "fired")


class VirtualEngine(TimingEngine):
    """Simulates the times and computes the gradients: each at its version, and only if it will be accepted.

    Args:
        cluster: workers and their times.
        seed: of the run.
        replica: computes every worker's gradients and the evaluations.
        server: owns the parameters.
    """

    def __init__(self, cluster: Cluster, seed: int, replica: Replica, server: ParameterServer) -> None:
        super().__init__(cluster, seed, payload_bytes=replica.layout.gradient_nbytes)
        device = server.device
        self._replica = replica
        self._server = server
        self._versions = Versions(lambda: replica.layout.allocate(device))
        self._gradient = replica.layout.allocate(device)
        self._work: dict[int, Compute] = {}
        self._times: dict[int, RoundTrip] = {}
        self._duration_s = self._remembered_duration_s
        server.publish(self._versions.publish(0))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End what the replica has started."""
        self._replica.close()
        super().__exit__(kind, error, where)

    def compute(self, command: Compute) -> None:
        """Keep the version until the gradient arrives."""
        silent = self._work.pop(command.worker, None)
        if silent is not None:  # declared lost, and joined again without a word about its old work
            self._versions.release(silent.version)
        self._versions.hold(command.version)
        self._work[command.worker] = command
        super().compute(command)

    def interrupt(self, command: Interrupt) -> None:
        """Forget the work and let its version go."""
        super().interrupt(command)
        self._versions.release(self._work.pop(command.worker).version)

    def accept(self, command: Accept) -> None:
        """Take the gradient that was computed for the arrival."""
        self._server.take(self._gradient, command.samples, command.step_scale)

    def apply(self, command: Apply) -> None:
        """Make the update and publish it."""
        super().apply(command)
        step = self._server.apply(command)
        self.tell_step(command, step)
        self._server.publish(self._versions.publish(command.version))

    def evaluate(self, command: Evaluate) -> None:
        """Measure the version at once; the run's clock does not notice."""
        metrics = self._replica.evaluate(self._versions[command.version])
        self._at(self.now, Evaluated(self.now, command.version, metrics))

    def state_dict(self) -> dict[str, Any]:
        """Return the versions that workers compute on, too."""
        return {
            **super().state_dict(),
            "versions": self._versions.state_dict(),
            "work": dict(self._work),
            "times": dict(self._times),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state of the same cluster."""
        super().load_state_dict(state)
        self._versions.load_state_dict(state["versions"])
        self._work = dict(state["work"])
        self._times = dict(state["times"])

    def go_on_from(self, version: int, now: float) -> None:
        """Begin at this time with what the server holds as this version."""
        super().go_on_from(version, now)
        self._server.publish(self._versions.publish(version))

    def _lose(self, fault: Fault, reason: str) -> Lost:
        self._versions.release(self._work.pop(fault.worker).version)
        return super()._lose(fault, reason)

    def _arrival(self, worker: int, draw: int) -> Arrival:
        self._finish(worker)
        work = self._work.pop(worker)
        measured = Measured(loss=nan, samples=0, squared_norm=nan, variance=nan, finite=True, compute_s=0.0)
        if self._coordinator.wants(worker, draw):
            measured = self._compute_gradient(work.worker, work.draw, work.minibatch, work.version)
        times = self._times[worker]
        arrival = Arrival(
            now=self.now,
            worker=worker,
            draw=draw,
            loss=measured.loss,
            samples=measured.samples,
            squared_norm=measured.squared_norm,
            finite=measured.finite,
            pull_s=times.pull_s,
            compute_s=times.compute_s,
            push_s=times.push_s,
            variance=measured.variance,
        )
        then = self._versions[work.version]
        arrival = compensated(arrival, self._coordinator, self._server, work.version, then, self._gradient)
        self._versions.release(work.version)
        return arrival

    def _compute_gradient(self, worker: int, draw: int, minibatch: Minibatch | None, version: int) -> Measured:
        self._server.let_go()  # of what lies in the one place for a gradient
        if self._replica.prepares_ahead:
            self._replica.expect(self._coming())
        try:
            return self._replica.gradient(worker, draw, minibatch, self._versions[version], self._gradient)
        except Exception as error:
            note_place(error, f"after update {version}")
            raise

    def _coming(self) -> Iterator[Piece]:
        """Yield the work that is under way, in the order of its arrivals."""
        for _, _, worker, draw in sorted(self._heap, key=itemgetter(0, 1)):
            if worker != NOT_A_WORKER and self._current[worker] == draw and worker in self._work:
                yield Piece(worker, draw, self._work[worker].minibatch)

    def _remembered_duration_s(self, worker: int, draw: int, start_s: float) -> float:
        self._times[worker] = times = self._round_trips.times(worker, draw, start_s)
        return times.total_s
