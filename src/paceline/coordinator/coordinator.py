"""The one state machine: events in, commands out. It reads no clock and touches no gradient."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, Literal

from paceline.coordinator.dispatcher import Dispatcher
from paceline.coordinator.evaluation_schedule import EvaluationSchedule
from paceline.coordinator.failure_detector import FailureDetector
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.coordinator.pending_update import PendingUpdate
from paceline.coordinator.phases import ControllerGroup, PhaseProgress
from paceline.coordinator.worker_table import ASIDE, BUSY, IDLE, LOST, NEVER, PROBED, WorkerState, WorkerStatus
from paceline.core.duration import Duration
from paceline.core.events import (
    AbortRun,
    Accept,
    Apply,
    Arrival,
    Command,
    Compute,
    Decision,
    Drop,
    EndRun,
    Evaluate,
    Evaluated,
    Event,
    Interrupt,
    Joined,
    Lost,
    Outcome,
    Restarted,
    RestartWorker,
    SetTimer,
    Step,
    Timer,
    UpdateApplied,
)
from paceline.core.stop import Stop as StopRule
from paceline.core.stop import StopMonitor
from paceline.errors import UsageError
from paceline.policies.compensation.base import Compensator
from paceline.policies.controllers import base as control
from paceline.policies.learning_rate import LRScaling, Scales, ScheduleCurve, ScheduleTracker
from paceline.protocols.momentum import KEEP, MomentumTracker
from paceline.protocols.protocol import Phase, Plan, Protocol
from paceline.utils.state_dict import restore, snapshot
from paceline.utils.wording import counted

STALE = "too stale"
NOT_FINITE = "not finite"
OLD_DRAW = "finished after its interrupt"
NOBODY_ELSE = "no other live worker can contribute"
LATE_RETURN = "its worker had been declared lost"
PROBE = "only a probe of its worker"
SILENT = "lost"
SET_ASIDE = "set_aside"
REJECTIONS_IN_A_ROW = 10


class Coordinator:
    """Decides who computes what, which gradients count, and when an update is made.

    Events must come in the order of their times. Every command of the returned list is to be carried out, in
    order, before the next event is handed in.

    Args:
        plan: phases of protocols, already checked against the workers and the workload.
        workers: that the run begins with, numbered from 0.
        stop: when to end.
        per_epoch: gradients of one epoch, if the data have a length.
        minibatches: deals out the data; None where the workers draw for themselves.
        learning_rate: its scale for an update of k gradients.
        schedule: that learning rate and weight decay follow by workload besides.
        patience: timeout on silent workers; None for no timeout.
        evaluate_every: updates, gradients or seconds between evaluations; None for no evaluation.
        measure_steps: whether every step is measured, also where no controller reads it.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        workers: int,
        stop: StopRule,
        per_epoch: float | None = None,
        minibatches: MinibatchSampler | None = None,
        learning_rate: LRScaling | None = None,
        schedule: ScheduleCurve | None = None,
        patience: FailureDetector | None = None,
        evaluate_every: Duration | None = None,
        measure_steps: bool = False,
    ) -> None:
        self.version = 0
        self.workload = 0
        self.stopped = False
        self.awaits_step = False  # an update is made, and its step has yet to be told
        self.has_begun = False  # there is a state to go on from
        self._workers_at_first = workers
        self._left: Literal["", "update", "timer"] | Evaluated = ""  # what the end of the run cut short
        self._now = 0.0
        self._commands: list[Command] = []

        self._plan = plan
        self._phase = -1
        self._share = PhaseProgress(None)
        self._protocol: Protocol = plan.phases[0].protocol
        self._council = ControllerGroup()
        self._watch = StopMonitor(stop, workers, per_epoch)
        self._evaluations = EvaluationSchedule(evaluate_every) if evaluate_every is not None else None

        self._dispatch = Dispatcher(minibatches)
        self._roster = roster = self._dispatch.roster
        self._workers, self._idle, self._in_flight = roster.workers, roster.idle, roster.in_flight
        self._delivered: int | None = None  # the worker of the arrival being handled

        self._update = PendingUpdate()
        self._learning_rate = learning_rate or LRScaling()
        self._schedule = ScheduleTracker(schedule) if schedule is not None else None
        self._momentum = MomentumTracker(per_epoch) if any(p.momentum != KEEP for p in plan.phases) else None
        self._measures_always = measure_steps
        self._measures = measure_steps
        self._made_of = 0
        self._step: Step | None = None

        self._patience = patience or FailureDetector()
        self._deserted_until_s = inf  # when the last silent worker was lost, plus the time to come back
        self._asked_for: set[float] = set()
        self._woken_for_s: float | None = stop.seconds

    # --- what engines ask ---------------------------------------------------------------------------------

    def begin(self, now: float = 0.0) -> list[Command]:
        """Open the first update with all workers, or go on where a state that was loaded left off."""
        commands: list[Command] = []
        self._commands = commands
        if self.has_begun:
            self._go_on()
            return commands
        self._now = now
        self.has_begun = True
        self._dispatch.enlist(range(self._workers_at_first))
        self._wake_at_fixed_times()
        self._enter_next_phase()
        self._open()
        return commands

    def wants(self, worker: int, draw: int) -> bool:
        """Return whether this gradient would be accepted if it arrived now and were finite."""
        state = self._workers[worker]
        current = state.status is BUSY and state.draw == draw
        return current and self.version - state.version <= self._protocol.max_staleness

    def expected_update(self) -> Apply:
        """Return the next update as it will be if every worker at work takes part: some step before it is made."""
        expected = tuple(Accept(worker, state.draw, 0, 1) for worker, state in self._in_flight.items())
        scales = self.scales(len(expected) or 1)
        return Apply(self.version + 1, expected, scales.lr, "expected", weight_decay_scale=scales.weight_decay)

    def ahead(self) -> dict[int, Compute]:
        """Return the work that will follow if everybody at work delivers, in the order of the workers, by worker."""
        return self._dispatch.ahead(self.version + 1)

    @property
    def is_limited(self) -> bool:
        """Whether the data come to an end."""
        return self._dispatch.is_limited

    @property
    def newcomers(self) -> frozenset[int]:
        """Workers that have joined since the open update was opened, and with whose part it does not wait."""
        return frozenset(self._update.newcomers)

    @property
    def patience_s(self) -> float:
        """Silence after which a worker may be declared lost; inf for never, and while no round trip is known."""
        return self._patience.timeout_s

    @property
    def compensators(self) -> tuple[Compensator, ...]:
        """What is done about stale gradients now."""
        return self._plan.phases[self._phase].compensators

    def scales(self, k: int) -> Scales:
        """Return what an update of k gradients, made now, would multiply learning rate and weight decay by."""
        scale = self._learning_rate.scale(k, self._roster.live or 1)
        if self._schedule is None:
            return Scales(scale)
        scheduled = self._schedule.scales(self.workload, k)
        return scheduled._replace(lr=scale * scheduled.lr)

    def handle(self, event: Event) -> list[Command]:
        """Take one event and return what is to be done, in order."""
        commands: list[Command] = []
        self._commands = commands
        if self.stopped and type(event) is not Restarted:
            return commands
        self._now = event.now
        if type(event) is Arrival:
            self._arrival(event)
        else:
            self._rarer_event(event)
        if not self.stopped:
            self._settle()
        return commands

    def _rarer_event(self, event: Event) -> None:
        match event:
            case UpdateApplied():
                self._applied(event)
            case Timer():
                self._timer()
            case Joined():
                self._join(event.worker)
            case Lost():
                self._lose(event.worker)
            case Evaluated():
                self._evaluated(event)
            case AbortRun():
                self._end(EndRun(event.outcome, event.reason))
            case Restarted():
                self._restart(event.workers)

    # --- arrivals -----------------------------------------------------------------------------------------

    def _arrival(self, event: Arrival) -> None:
        worker = self._workers[event.worker]
        if event.draw != worker.draw or worker.status is not BUSY:
            self._rarer_arrival(event, worker)
            return
        staleness = self.version - worker.version
        if self._patience.observes:
            self._observe(event.worker, event.now - worker.started_s)
        self._dispatch.deliver(event.worker, worker)
        accepted = False
        if not event.finite:
            self._reject(event, worker, staleness)
        elif staleness > self._protocol.max_staleness:
            self._drop(event, worker, staleness, STALE)
        else:
            accepted = True
            self._accept(event, worker, staleness)
        self._delivered = event.worker
        if self._council and not self.stopped:
            self._consult(
                "arrival", arrival=event, busy_s=_busy_s(event, worker), staleness=staleness, accepted=accepted
            )

    def _accept(self, event: Arrival, worker: WorkerState, staleness: int) -> None:
        command = Accept(event.worker, event.draw, staleness, event.samples, event.step_scale)
        self._commands.append(command)
        self._update.hold(command)
        worker.contributed_to = self.version
        worker.rejections = 0
        self._watch.accept(event.loss)
        if self._schedule is not None and (reason := self._schedule.accept(event.loss)):
            self._commands.append(Decision("warm_up", reason))

    def _drop(self, event: Arrival, worker: WorkerState, staleness: int, reason: str) -> None:
        self._commands.append(Drop(event.worker, event.draw, staleness, reason))
        self._dispatch.give_back(worker)

    def _reject(self, event: Arrival, worker: WorkerState, staleness: int) -> None:
        # Not given back: a minibatch that breaks one gradient would break the next one too.
        self._commands.append(Drop(event.worker, event.draw, staleness, NOT_FINITE))
        worker.rejections += 1
        if self._plan.reduction is not None:
            self._leave_out(event.worker, worker)
        self._check_rejections(event.worker, worker)

    def _leave_out(self, number: int, worker: WorkerState) -> None:
        """Make the update without this worker: without a server, all hand in at once, or nobody does."""
        worker.contributed_to = self.version
        self._update.owing.discard(number)
        if not (self._update.held or self._update.owing):
            for each in self._roster.taking_part():
                self._workers[each].contributed_to = NEVER
                self._update.owing.add(each)
            self._dispatch.is_due = True

    def _check_rejections(self, worker: int, state: WorkerState) -> None:
        if state.rejections >= REJECTIONS_IN_A_ROW:
            reason = (
                f"{state.rejections} gradients in a row of worker {worker} were not finite, the last at "
                f"update {self.version}; lower the learning rate, clip gradients (clip_norm=) or check the data"
            )
            self._end(EndRun(Outcome.NOT_FINITE, reason))

    def _rarer_arrival(self, event: Arrival, worker: WorkerState) -> None:
        if event.draw != worker.draw or worker.status in {IDLE, ASIDE}:
            self._commands.append(Drop(event.worker, event.draw, None, OLD_DRAW))
        elif worker.status is PROBED:
            staleness = self.version - worker.version
            self._commands.append(Drop(event.worker, event.draw, staleness, PROBE))
            worker.status = ASIDE
            self._consult("arrival", arrival=event, busy_s=_busy_s(event, worker), staleness=staleness)
        else:
            self._observe(event.worker, event.now - worker.started_s)
            self._commands.append(Drop(event.worker, event.draw, self.version - worker.version, LATE_RETURN))
            self._join(event.worker)

    # --- updates ------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Make the update if it is due, and give work to whom this event has made free to start."""
        update = self._update
        if reason := update.due():
            self._make_update(reason)
        elif update.held and update.newcomers and not self._others_can_contribute():
            self._make_update(NOBODY_ELSE)
        elif self._dispatch.is_due:
            self._refill()
        elif self._delivered is not None and self._delivered in self._idle:  # not set aside meanwhile
            self._give_if_allowed(self._delivered)
        self._delivered = None
        is_limited = self._dispatch.is_limited
        if update.held and not self._in_flight and (is_limited or not update.owing) and not self.awaits_step:
            self._make_update(NOBODY_ELSE)
        if is_limited and not (update.held or self._in_flight or self.stopped or self.awaits_step):
            self._end_of_data()

    def _others_can_contribute(self) -> bool:
        """Whether a worker that was there when the update was opened is at work or may start."""
        may_start = (worker for worker in self._idle if self._dispatch.may_start(worker, self.version))
        return bool(self._update.owing) or not self._update.newcomers.issuperset([*self._in_flight, *may_start])

    def _make_update(self, reason: str) -> None:
        gradients, step_scale = self._update.take()
        k = len(gradients)
        self.version += 1
        scales = self.scales(k)
        limit = self._limit_momentum() if self._momentum is not None else inf
        self.workload += k
        self._made_of = k
        self._commands.append(
            Apply(self.version, gradients, scales.lr, reason, self._measures, step_scale, limit, scales.weight_decay)
        )
        self.awaits_step = self._measures
        if not self.awaits_step:
            self._check_update()

    def _limit_momentum(self) -> float:
        """Return the largest momentum for the update that is made now."""
        assert self._momentum is not None
        rule = self._plan.phases[self._phase].momentum
        if change := self._momentum.follow(rule, self.workload, self._roster.live or 1):
            self._commands.append(Decision("momentum", change))
        return self._momentum.limit

    def _applied(self, event: UpdateApplied) -> None:
        self.awaits_step = False
        self._step = event.step
        self._check_update()

    def _check_update(self) -> None:
        stop = self._watch.after_update(self.version, self.workload)
        if stop is not None:
            self._left = "update"
            self._end(stop)
        else:
            self._finish_update()

    def _finish_update(self) -> None:
        if self._evaluations is not None and self._evaluations.is_due(self.version, self.workload, self._now):
            self._commands.append(Evaluate(self.version))
        self._check_phase()
        self._interrupt_stale()
        self._update.newcomers.clear()
        self._open()

    def _interrupt_stale(self) -> None:
        """Interrupt work that could no longer be accepted; of newcomers always, for from now on all wait for them."""
        oldest = self.version - self._protocol.max_staleness
        if self._protocol.on_update == "interrupt":
            self._commands += self._dispatch.abandon_older_than(oldest)
        elif self._update.newcomers:
            self._commands += self._dispatch.abandon_older_than(oldest, of=self._update.newcomers)

    def _open(self) -> None:
        self._update.open(self._now)
        if self._council:
            self._consult("open", step=self._step)
        self._step = None
        self._refill()
        self._update.wait_for(self._in_flight.keys())

    def _evaluated(self, event: Evaluated) -> None:
        if self._evaluations is not None:
            self._evaluations.end()
        stop = self._watch.after_evaluation(event.version, event.metrics)
        if stop is not None:
            self._left = event
            self._end(stop)

    def _end(self, stop: EndRun) -> None:
        self.stopped = True
        self._commands.append(stop)

    def _end_of_data(self) -> None:
        """Nobody is at work: every sample was seen so many times, or the lead waits for a worker without data."""
        if self._dispatch.are_data_used_up:
            were = f"{counted(self.workload, 'gradient')} {'was' if self.workload == 1 else 'were'}"
            reason = f"every minibatch was dealt out; {were} applied, the others not finite"
            self._end(EndRun(Outcome.EPOCHS, reason))
        else:
            self._dispatch.release_from_those_without_data()
            self._refill()

    # --- work and membership ------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Give work to every idle worker that may have some."""
        self._dispatch.is_due = False
        for worker in list(self._idle):
            self._give_if_allowed(worker)

    def _give_if_allowed(self, worker: int) -> None:
        if self._dispatch.may_start(worker, self.version):
            self._commands.append(self._dispatch.give(worker, self.version, self._now))
            if self._patience.needs_alarm:
                self._arm_timeout()

    def _join(self, worker: int) -> None:
        if self._roster.status(worker) in {IDLE, BUSY}:
            self._lose(worker)  # it came back before its loss was noticed
        self._dispatch.enlist([worker])
        self._deserted_until_s = inf
        self._update.newcomers.add(worker)
        self._dispatch.is_due = True

    def _lose(self, worker: int) -> None:
        status = self._roster.status(worker)
        if status in {ASIDE, PROBED}:
            self._workers[worker].status = LOST
        elif status is not LOST:
            self._take_out(worker, LOST)

    def _take_out(self, worker: int, status: WorkerStatus) -> None:
        self._dispatch.take_out(worker, status)
        self._update.leave(worker)

    # --- time ---------------------------------------------------------------------------------------------

    def _wake(self, at_s: float) -> None:
        self._commands.append(SetTimer(at_s))

    def _wake_at_fixed_times(self) -> None:
        if self._watch.seconds is not None:
            self._wake(self._watch.seconds)
        for phase in self._plan.phases:
            if phase.end is not None and phase.end.unit == "seconds":
                self._wake(phase.end.amount)
        if self._share.end is not None and self._share.end.unit == "seconds":
            self._wake(self._share.ends_at)

    def _timer(self) -> None:
        now = self._now
        stop = self._watch.at(now)
        if stop is not None:
            self._left = "timer"
            self._end(stop)
            return
        phase = self._phase
        self._check_phase()
        if self._phase != phase and self._council:
            self._consult("open")  # for them, the open update begins here
        if not self._roster.live and now >= self._deserted_until_s:
            self._left = "timer"
            self._end(EndRun(Outcome.NO_WORKERS, "every worker is lost, and none has come back"))
            return
        self._declare_lost()
        due = {at for at in self._asked_for if at <= now}
        if due:
            self._asked_for -= due
            self._consult("timer")

    def _observe(self, worker: int, round_trip_s: float) -> None:
        if change := self._patience.observe(worker, round_trip_s):
            self._commands.append(Decision("worker_timeout", change))
        if self._patience.needs_alarm:
            self._arm_timeout()

    def _arm_timeout(self) -> None:
        if self._in_flight and self._patience.timeout_s < inf:
            self._wake(self._patience.arm(self._in_flight, self._now))

    def _declare_lost(self) -> None:
        if not self._patience.is_over(self._now):
            return
        for worker, timeout in self._patience.exceeded_by(self._in_flight, self._now).items():
            self._commands.append(Decision(SILENT, f"worker {worker}: silent for {timeout}", worker))
            self._lose(worker)
            if not self._roster.live:
                self._deserted_until_s = self._now + self._patience.timeout_s
                self._wake(self._deserted_until_s)
        self._arm_timeout()

    # --- phases and controllers ---------------------------------------------------------------------------

    def _check_phase(self) -> None:
        while self._share.end is not None and self._share.is_done(self._position(self._share.end)):
            self._enter_next_phase()

    def _position(self, end: Duration) -> float:
        return end.position(self.version, self.workload, self._now)

    def _enter_next_phase(self) -> None:
        ended = self._share.end
        if self._council:
            self._consult("end")
        self._phase += 1
        self._take_up(self._plan.phases[self._phase])
        self._council.begin(self._roster.live or 1)
        if self._momentum is not None:
            self._momentum.begin(self.workload)
        self._asked_for.clear()
        protocol = self._plan.phases[self._phase].protocol
        self._change_protocol(protocol, f"{ended} reached" if ended else "the run begins")

    def _take_up(self, phase: Phase) -> None:
        self._share = PhaseProgress(phase.end)
        self._council = ControllerGroup(phase)
        self._measures = self._measures_always or self._council.reads_steps

    def _change_protocol(self, protocol: Protocol, reason: str) -> None:
        self._commands.append(Decision("protocol", f"{protocol.name}: {reason}"))
        self._protocol = protocol
        self._dispatch.follow(protocol)
        live = self._roster.taking_part()
        self._update.follow(protocol, {w for w in live if self._workers[w].contributed_to != self.version})

    def _consult(
        self,
        trigger: control.Trigger,
        *,
        arrival: Arrival | None = None,
        busy_s: float = 0.0,
        staleness: int = 0,
        accepted: bool = False,
        step: Step | None = None,
    ) -> None:
        observation = control.Observation(
            trigger=trigger,
            now=self._now,
            version=self.version,
            opened_s=self._update.opened_s,
            live=self._roster.live,
            held=len(self._update.held),
            quorum=self._update.quorum,
            protocol=self._protocol,
            workload=self.workload,
            learning_rate=self._learning_rate,
            schedule_scale=self._schedule.scales(self.workload, 1).lr if self._schedule is not None else 1.0,
            update_size=self._made_of,
            workers=self._roster.taking_part() if trigger == "open" else (),
            excluded=self._roster.aside() if trigger == "open" else (),
            step=step,
            arrival=arrival,
            busy_s=busy_s,
            staleness=staleness,
            accepted=accepted,
        )
        for action in self._council.decide(observation):
            self._obey(action)

    def _obey(self, action: control.Action) -> None:
        match action:
            case control.Exclude(worker, reason):
                self._set_aside(worker, self._known(worker), reason)
            case control.Readmit(worker, reason):
                self._take_back(worker, self._known(worker), reason)
            case control.Probe(worker):
                if self._known(worker).status is ASIDE:
                    self._commands.append(self._dispatch.probe(worker, self.version, self._now))
            case control.ReplaceWorker(worker):
                if self._known(worker).status is not LOST:
                    self._commands.append(RestartWorker(worker))
            case control.ChangeProtocol(protocol, reason, counts):
                self._change_protocol(protocol, reason)
                self._count(counts)
            case control.SetQuorum(k, reason):
                if k < 1:
                    raise UsageError(f"a controller asked for a quorum of {k!r} ({reason}); expected k >= 1")
                self._commands.append(Decision("quorum", f"k={k}: {reason}", k=k))
                self._update.change_quorum(k, reason)
            case control.CloseUpdate(reason):
                self._update.close(reason)
            case control.CallAgainAt(at_s):
                self._asked_for.add(at_s)
                self._wake(at_s)
            case control.Note(kind, reason, worker):
                self._commands.append(Decision(kind, reason, worker))

    def _known(self, worker: int) -> WorkerState:
        if worker not in self._workers:
            raise UsageError(f"a controller named worker {worker}; known are {sorted(self._workers)}")
        return self._workers[worker]

    def _set_aside(self, worker: int, state: WorkerState, reason: str) -> None:
        if state.status not in {IDLE, BUSY}:
            return  # one that was lost cannot be handed back
        if self._roster.live == 1:
            self._commands.append(Decision("kept", f"worker {worker}, the last one, in spite of: {reason}", worker))
            return
        self._commands.append(Decision(SET_ASIDE, f"worker {worker}: {reason}", worker))
        if state.status is BUSY:
            self._commands.append(self._dispatch.abandon(worker, state))
        self._take_out(worker, ASIDE)

    def _take_back(self, worker: int, state: WorkerState, reason: str) -> None:
        if state.status not in {ASIDE, PROBED}:
            return
        self._commands.append(Decision("take_back", f"worker {worker}: {reason}", worker))
        if state.status is PROBED:
            self._commands.append(Interrupt(worker, state.draw))
        self._join(worker)

    def _count(self, counts: bool) -> None:
        """Let what is made from here on count towards the end of the phase, or not."""
        end = self._share.end
        if end is None:
            return
        if not counts:
            self._share.pause(self._position(end))
            return
        self._share.go_on(self._position(end))
        if end.unit == "seconds":
            self._wake(self._share.ends_at)

    # --- going on -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a coordinator of the same plan needs to go on."""
        return {
            "plan": self._plan.in_full,
            "seconds": self._watch.seconds,
            "is_limited": self.is_limited,
            "dispatch": self._dispatch.state_dict(),
            "update": self._update.state_dict(),
            "controllers": self._council.state_dict(),
            "watch": self._watch.state_dict(),
            "evaluations": self._evaluations and self._evaluations.state_dict(),
            "patience": self._patience.state_dict(),
            "share": self._share.state_dict(),
            "schedule": self._schedule and self._schedule.state_dict(),
            "momentum": self._momentum and self._momentum.state_dict(),
            **snapshot(self, _SAVED),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take on a state; where the plan is another one, what belongs to it waits for a `Restarted`."""
        self.has_begun = True
        restore(self, _SAVED, state)
        self._dispatch.load_state_dict(state["dispatch"], self._protocol)
        self._update.load_state_dict(state["update"])
        self._watch.load_state_dict(state["watch"])
        if self._evaluations is not None and state["evaluations"] is not None:
            self._evaluations.load_state_dict(state["evaluations"])
        self._patience.load_state_dict(state["patience"])
        if self._schedule is not None:
            self._schedule.load_state_dict(state["schedule"])
        self._woken_for_s = state["seconds"]
        if state["plan"] != self._plan.in_full:
            self._phase = -1
            return
        self._take_up(self._plan.phases[self._phase])
        self._share.load_state_dict(state["share"])
        self._council.load_state_dict(state["controllers"])
        if self._momentum is not None:
            self._momentum.load_state_dict(state["momentum"])

    def _go_on(self) -> None:
        """Do what the end of the run cut short, perhaps to end at once again."""
        self.stopped = False
        self._dispatch.is_due |= self.is_limited  # there may be more epochs now
        if self._watch.seconds is not None and self._watch.seconds != self._woken_for_s:
            self._wake(self._watch.seconds)
        left, self._left = self._left, ""
        if left == "update":
            self._check_update()
        elif left == "timer":
            self._timer()
        elif left:
            self._evaluated(left)
        for worker, state in self._workers.items():
            if not self.stopped:
                self._check_rejections(worker, state)
        if not self.stopped:
            self._settle()

    def _restart(self, workers: int) -> None:
        """Give all work out anew, to these workers."""
        self._dispatch.stop_all()
        is_other_plan = self._phase < 0
        for worker in list(self._workers):
            # Under another plan nobody remembers why one was set aside; it joins again below.
            if worker >= workers or (is_other_plan and self._workers[worker].status is ASIDE):
                self._lose(worker)
        if is_other_plan:
            self._enter_next_phase()
            self._check_phase()
        for worker in range(workers):
            if self._roster.status(worker) is LOST:
                self._join(worker)
        if is_other_plan and self._council and self._left != "update":
            self._consult("open")
        self._dispatch.is_due = True
        self._wake_again()
        if self._evaluations is not None and self._evaluations.is_running:
            self._commands.append(Evaluate(self.version))
        self._go_on()

    def _wake_again(self) -> None:
        self._patience.disarm()
        self._woken_for_s = self._watch.seconds
        self._wake_at_fixed_times()
        for at_s in sorted(self._asked_for | ({self._deserted_until_s} - {inf})):
            self._wake(at_s)


# The part of the state that a checkpoint can hold as it is.
_SAVED = (
    "version",
    "workload",
    "stopped",
    "awaits_step",
    "_made_of",
    "_step",
    "_left",
    "_phase",
    "_protocol",
    "_deserted_until_s",
    "_asked_for",
    "_now",
)


def _busy_s(event: Arrival, worker: WorkerState) -> float:
    """Return what the worker has measured, or else the whole round trip."""
    return event.pull_s + event.compute_s + event.push_s or event.now - worker.started_s
