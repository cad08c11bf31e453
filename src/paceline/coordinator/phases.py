"""Phases of a plan and their controllers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from paceline.coordinator.controller_group import ControllerGroup
from paceline.coordinator.membership import Membership
from paceline.coordinator.pending_update import PendingUpdate
from paceline.coordinator.phase_progress import PhaseProgress
from paceline.coordinator.run_state import RunState
from paceline.coordinator.settings import CoordinatorSettings
from paceline.coordinator.step_scaling import StepScaling
from paceline.coordinator.worker_table import BUSY, EXCLUDED, LOST, WorkerState
from paceline.core.events import Arrival, Interrupt, RestartWorker, Step
from paceline.errors import UsageError
from paceline.policies.compensation.base import Compensator, compensators_of
from paceline.policies.controllers import base as control
from paceline.protocols.momentum import KEEP, MomentumTracker
from paceline.protocols.protocol import Phase, Plan, Protocol


class PhaseRunner:
    """Runs the phases of a plan: asks their controllers, applies the actions, and begins the next phase.

    Args:
        run: shared state.
        plan: phases of protocols.
        membership: workers and their work.
        update: update in progress.
        scaling: learning-rate scale.
        settings: gradients of one epoch, and whether every step is measured.

    Attributes:
        protocol: protocol in force.
        compensators: corrections of stale gradients in this phase.
        has_controllers: whether this phase has controllers.
        controllers: controllers of this phase.
        measures_steps: whether steps are measured now.
        limits_momentum: whether a phase of the plan limits the momentum.
        step: step of the latest update, until the next update is opened; None if it was not measured.
    """

    def __init__(
        self,
        run: RunState,
        plan: Plan,
        membership: Membership,
        update: PendingUpdate,
        scaling: StepScaling,
        settings: CoordinatorSettings,
    ) -> None:
        self.protocol: Protocol = plan.phases[0].protocol
        self.compensators: tuple[Compensator, ...] = ()
        self.has_controllers = False
        self.measures_steps = settings.measure_steps
        self.step: Step | None = None
        self._run = run
        self._plan = plan
        self._membership = membership
        self._table = membership.table
        self._dispatcher = membership.dispatcher
        self._update = update
        self._scaling = scaling
        self._settings = settings
        self._momentum = MomentumTracker(settings.per_epoch) if any(p.momentum != KEEP for p in plan.phases) else None
        self.limits_momentum = self._momentum is not None
        self._index = -1
        self._progress = PhaseProgress(None)
        self.controllers = ControllerGroup()
        self._interrupted: list[control.Work] = []  # since the latest update was opened
        self._timers: set[float] = set()  # times at which controllers asked to be called

    @property
    def is_before_first(self) -> bool:
        """Whether no phase of this plan has begun."""
        return self._index < 0

    # --- phases -------------------------------------------------------------------------------------------

    def check(self) -> bool:
        """Begin the next phase if this one is over; return whether a phase has begun."""
        before = self._index
        while self._progress.end is not None and self._progress.is_done(self._run.position(self._progress.end)):
            self.enter_next()
        return self._index != before

    def enter_next(self) -> None:
        """Begin the next phase."""
        ended = self._progress.end
        if self.has_controllers:
            self.ask("end")  # so that it readmits workers that it has excluded (decision 0016)
        self._index += 1
        phase = self._plan.phases[self._index]
        self._select(phase)
        self.controllers.begin(self._table.live or 1)  # all workers may be lost
        if self._momentum is not None:
            self._momentum.begin(self._run.workload)
        self._timers.clear()
        self._dispatcher.begin_phase()
        self._change_protocol(phase.protocol, f"{ended} reached" if ended else "the run begins")

    def _select(self, phase: Phase) -> None:
        self._progress = PhaseProgress(phase.end)
        self.controllers = ControllerGroup(phase)
        self.has_controllers = bool(phase.controllers)
        self.compensators = compensators_of(phase)
        self.measures_steps = self._settings.measure_steps or self.controllers.reads_steps

    def _change_protocol(
        self, protocol: Protocol, reason: str, price: float | None = None, numbers: Mapping[str, float] | None = None
    ) -> None:
        self._run.decide("protocol", f"{protocol.name}: {reason}", numbers=numbers)
        self.protocol = protocol
        if self._scaling.noise is not None:
            self._scaling.noise.price.follow(protocol, self._table.live or 1, price)
        self._dispatcher.follow(protocol)
        version, workers = self._run.version, self._table.workers
        if protocol.refill == "share":  # a queue needs all workers, and stale work may take long
            self.interrupt(self._dispatcher.cancel_older_than(version))
        self._update.follow(protocol, {w for w in self._table.active() if workers[w].contributed_to != version})

    def _change_lead(self, lead: int, reason: str) -> None:
        """Change the largest lead of the protocol in force, which keeps the quorum of the update in progress."""
        if self.protocol.max_lead == inf:
            raise UsageError(
                f"a controller asked for a lead of {lead} ({reason}) under {self.protocol.name}, which has no bound; "
                "change the protocol to one with max_lead="
            )
        self._run.decide("lead", f"lead={lead}: {reason}")
        self.protocol = replace(self.protocol, max_lead=lead)
        if self._scaling.noise is not None:
            self._scaling.noise.price.follow(self.protocol, self._table.live or 1)
        self._dispatcher.follow(self.protocol)

    def momentum_limit(self) -> float:
        """Return the largest momentum for the update that is made now."""
        assert self._momentum is not None
        rule = self._plan.phases[self._index].momentum
        if change := self._momentum.follow(rule, self._run.workload, self._table.live or 1):
            self._run.decide("momentum", change)
        return self._momentum.limit

    # --- time ---------------------------------------------------------------------------------------------

    def set_timers(self) -> None:
        """Ask for a timer at the end of every phase in seconds, and at each time that a controller asked for."""
        for phase in self._plan.phases:
            if phase.end is not None and phase.end.unit == "seconds":
                self._run.set_timer(phase.end.amount)
        if self._progress.end is not None and self._progress.end.unit == "seconds":
            self._run.set_timer(self._progress.ends_at)
        for at_s in sorted(self._timers):
            self._run.set_timer(at_s)

    def ask_at_timer(self) -> None:
        """Ask the controllers if one of them asked for a call at this time."""
        if due := {at for at in self._timers if at <= self._run.now}:
            self._timers -= due
            self.ask("timer")

    # --- controllers --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Let the controllers of this phase do work of their next decisions."""
        if self.has_controllers:
            self.controllers.prepare()

    def ask(
        self,
        trigger: control.Trigger,
        *,
        arrival: Arrival | None = None,
        busy_s: float = 0.0,
        staleness: int = 0,
        accepted: bool = False,
        trip_s: float = 0.0,
        share: float = 1.0,
    ) -> None:
        """Ask the controllers of this phase, and apply their actions.

        Args:
            trigger: reason of the call.
            arrival: gradient that has just arrived, if any.
            busy_s: seconds that its worker has spent on it.
            trip_s: seconds since its work was assigned.
            share: samples of that work over those of a whole minibatch.
            staleness: staleness of that gradient, in versions.
            accepted: whether it entered the update.
        """
        run, update, table, noise = self._run, self._update, self._table, self._scaling.noise
        observation = control.Observation(
            trigger=trigger,
            now=run.now,
            version=run.version,
            opened_s=update.opened_s,
            live=table.live,
            held=len(update.held),
            quorum=update.quorum,
            protocol=self.protocol,
            workload=run.workload,
            learning_rate=self._scaling.learning_rate,
            schedule_scale=self._scaling.schedule_scale(run.workload),
            update_size=run.update_size,
            workers=table.active() if trigger == "open" else (),
            excluded=table.excluded() if trigger == "open" else (),
            step=self.step if trigger == "open" else None,
            arrival=arrival,
            busy_s=busy_s,
            trip_s=trip_s,
            share=share,
            batch_size=self._settings.batch_size,
            staleness=staleness,
            accepted=accepted,
            interrupted=self._interrupted if trigger == "open" else (),
            leads=self._dispatcher.leads if trigger == "open" else {},
            in_flight=[*map(self._work, self._table.in_flight)] if self.controllers.reads_work else (),
            noise=noise.estimate if noise is not None else None,
            price=noise.price_of_staleness if noise is not None else 1.0,
            has_risen=noise is not None and noise.has_risen,
        )
        if trigger == "open":
            self._interrupted = []
        for action in self.controllers.decide(observation):
            self._apply(action)

    def _apply(self, action: control.Action) -> None:
        run = self._run
        match action:
            case control.Exclude(worker, reason):
                self._membership.exclude(worker, self._known(worker), reason)
            case control.Readmit(worker, reason):
                self._membership.readmit(worker, self._known(worker), reason)
            case control.Probe(worker):
                if self._known(worker).status is EXCLUDED:
                    run.commands.append(self._dispatcher.probe(worker, run.version, run.now))
            case control.ReplaceWorker(worker):
                if self._known(worker).status is not LOST:
                    run.commands.append(RestartWorker(worker))
            case control.RestartWork(worker, reason):
                if self._known(worker).status is BUSY:
                    run.decide("restart", f"worker {worker}: {reason}", worker)
                    self.interrupt([self._dispatcher.restart(worker)])
            case control.ChangeProtocol(protocol, reason, counts, price, numbers):
                self._change_protocol(protocol, reason, price, numbers)
                self._count(counts)
            case control.SetLead(lead, reason):
                self._change_lead(lead, reason)
            case control.SetQuorum(k, reason):
                if k < 1:
                    raise UsageError(f"a controller asked for a quorum of {k!r} ({reason}); expected k >= 1")
                run.decide("quorum", f"k={k}: {reason}", k=k)
                self._update.change_quorum(k, reason)
            case control.SetShares(shares, batch_size, reason, leases):
                if reason:
                    numbers = {str(worker): float(samples) for worker, samples in shares.items()}
                    run.decide("shares", reason, numbers=numbers)
                self._dispatcher.deal(shares, batch_size, leases)
            case control.CloseUpdate(reason):
                self._update.close(reason)
            case control.CallAgainAt(at_s):
                self._timers.add(at_s)
                run.set_timer(at_s)
            case control.Note(kind, reason, worker, numbers):
                run.decide(kind, reason, worker, numbers=numbers)

    def interrupt(self, interrupts: Sequence[Interrupt]) -> None:
        """Interrupt work that was cancelled now, and keep it for the controllers."""
        self._run.commands += interrupts
        if self.has_controllers:
            self._interrupted += [self._work(each.worker) for each in interrupts]

    def _work(self, worker: int) -> control.Work:
        state = self._table.workers[worker]
        return control.Work(worker, state.version, self._run.now - state.started_s, state.share)

    def _known(self, worker: int) -> WorkerState:
        if worker not in self._table.workers:
            raise UsageError(f"a controller named worker {worker}; known are {sorted(self._table.workers)}")
        return self._table.workers[worker]

    def _count(self, counts: bool) -> None:
        """Start or stop counting updates towards the end of the phase."""
        end = self._progress.end
        if end is not None and not counts:
            self._progress.pause(self._run.position(end))
        elif end is not None:
            self._progress.resume(self._run.position(end))
            if end.unit == "seconds":
                self._run.set_timer(self._progress.ends_at)

    # --- checkpoint ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the plan, the position in it, and the states of the controllers."""
        return {
            "plan": self._plan.in_full,
            "index": self._index,
            "protocol": self.protocol,
            "step": self.step,
            "interrupted": [tuple(each) for each in self._interrupted],
            "timers": set(self._timers),
            "progress": self._progress.state_dict(),
            "controllers": self.controllers.state_dict(),
            "momentum": self._momentum and self._momentum.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load such a state; under another plan, the first phase begins when the run is restarted."""
        self.protocol = state["protocol"]
        self.step = state["step"]
        self._interrupted = [control.Work(*each) for each in state.get("interrupted", ())]  # missing in early runs
        self._timers = set(state["timers"])
        self._dispatcher.follow(self.protocol)
        if state["plan"] != self._plan.in_full:
            return
        self._index = state["index"]
        self._select(self._plan.phases[self._index])
        self._progress.load_state_dict(state["progress"])
        self.controllers.load_state_dict(state["controllers"])
        if self._momentum is not None:
            self._momentum.load_state_dict(state["momentum"])
