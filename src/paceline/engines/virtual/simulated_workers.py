"""Simulated workers, and the clock of their run: what a simulation with a server and one without have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappush
from math import inf
from typing import Any, ClassVar

from paceline.clusters.faults import Fault
from paceline.clusters.simulated import Cluster
from paceline.coordinator.coordinator import Coordinator
from paceline.core import events
from paceline.core.gradient import NOT_MEASURED
from paceline.engines.loop import RunLoop
from paceline.engines.ports import Clock, Workers
from paceline.engines.signals import Signals
from paceline.engines.virtual.times_only import TimesOnly
from paceline.recording.history import Totals
from paceline.utils.state_dict import Stateful

NOT_A_WORKER = -1


class SimulatedWorkers(Stateful, Workers, Clock):
    """Simulated workers, and the clock of their run, which is that of events.

    Args:
        cluster: workers and their times.
        seed: seed of the run, >= 0.
        payload_bytes: bytes of the parameters, and of a gradient, >= 0.
        update_s: time of the server for an update in seconds, >= 0.

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
    _parts = ("totals",)
    _defaults: ClassVar[Mapping[str, Any]] = {"steps": {}}

    def __init__(self, cluster: Cluster, seed: int, payload_bytes: float, update_s: float) -> None:
        self.now = 0.0
        self.evaluation: Callable[[int], dict[str, float]] | None = None
        self._round_trips = cluster.round_trips(seed, payload_bytes)
        self._update_s = update_s
        self._heap: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._current = [0] * cluster.n  # draw that each worker is computing, 0 for none
        self._started_s = [0.0] * cluster.n
        self._steps: dict[int, int] = {}  # of the newest task of each worker that makes local steps
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

    # --- workers ------------------------------------------------------------------------------------------

    def meet(self, coordinator: Coordinator) -> None:
        """Note the coordinator, on whose timeout depends when a worker that hangs is lost."""
        self._coordinator = coordinator

    def start(self, signals: Signals) -> bool:
        """Return True: there are no processes."""
        return True

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

    def on_idle(self) -> None:
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

    def _finish(self, worker: int) -> None:
        self._current[worker] = 0
        self._busy_s += self.now - self._started_s[worker]

    def _arrival(self, worker: int, draw: int, fault: Fault | None) -> events.Arrival:
        """Return the gradient of a task, which ends now; a fault is that the gradient is not finite."""
        if fault is not None:
            self.fired.append(fault)
        self._arrivals += 1
        self._finish(worker)
        minibatches = self._steps.get(worker, 1)
        measured = NOT_MEASURED
        if fault is not None or minibatches > 1:
            measured = measured._replace(finite=fault is None, minibatches=minibatches)
        return events.Arrival(self.now, worker, draw, measured)

    def _at(self, at_s: float, event: events.Event) -> None:
        self._sequence += 1
        heappush(self._heap, (at_s, self._sequence, NOT_A_WORKER, event))

    def _inject_fault(self, fault: Fault) -> events.Lost | None:
        """Let a task end without a gradient; return the loss of its worker, None if the worker hangs."""
        self.fired.append(fault)
        if fault.kind == "hang":
            return None
        if fault.back_after_s is not None:
            self._at(self.now + fault.back_after_s, events.Joined(self.now, fault.worker))
        return self._lose(fault, f"scripted fault at draw {fault.draw}")

    def _lost_by_hanging(self) -> events.Lost | None:
        """Return the loss of a hanging worker if no other worker computes and no timeout would detect it."""
        if self._coordinator.timeout_s < inf or (self._heap and self._heap[0][0] <= self.now):
            return None
        hanging = {f.worker: f for f in self.fired if f.kind == "hang" and self._current[f.worker] == f.draw}
        if not hanging or any(draw and worker not in hanging for worker, draw in enumerate(self._current)):
            return None
        fault = next(iter(hanging.values()))
        return self._lose(fault, f"scripted fault: hangs since draw {fault.draw}, while no other worker computes")

    def _lose(self, fault: Fault, reason: str) -> events.Lost:
        self._finish(fault.worker)
        return events.Lost(self.now, fault.worker, reason)

    def _no_workers(self) -> events.AbortRun:
        return events.AbortRun(self.now, events.Outcome.NO_WORKERS, "no live worker will deliver another gradient")
