"""State machine of synchronization: events in, commands out. It reads no clock and touches no gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.coordinator.admission import GradientAdmission
from paceline.coordinator.dispatcher import Dispatcher
from paceline.coordinator.evaluation_schedule import EvaluationSchedule
from paceline.coordinator.failure_detector import FailureDetector
from paceline.coordinator.membership import Membership
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.coordinator.pending_update import PendingUpdate
from paceline.coordinator.phases import PhaseRunner
from paceline.coordinator.run_state import RunState
from paceline.coordinator.settings import DEFAULT, CoordinatorSettings
from paceline.coordinator.step_scaling import StepScaling
from paceline.coordinator.updates import UpdateRunner
from paceline.coordinator.worker_table import BUSY
from paceline.core import events
from paceline.core.stop import Stop as StopRule
from paceline.core.stop import StopMonitor
from paceline.policies.compensation.base import Compensator
from paceline.policies.noise_rule import NoiseTracker
from paceline.protocols.protocol import Plan


class Coordinator:
    """Decides which worker computes what, which gradients are accepted, and when an update is made.

    Events must come in the order of their times. The caller carries out every command of an answer, in order,
    before it hands in the next event.

    Args:
        plan: phases of protocols, already checked against the workers and the workload.
        workers: number of workers at the beginning, numbered from 0.
        stop: conditions that end the run.
        settings: epochs, learning rate, evaluations and measured steps.
        minibatches: assigns minibatches; None if workers draw samples themselves.
        failure_detector: timeout on silent workers; None for no timeout.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        workers: int,
        stop: StopRule,
        settings: CoordinatorSettings = DEFAULT,
        minibatches: MinibatchSampler | None = None,
        failure_detector: FailureDetector | None = None,
    ) -> None:
        self.has_begun = False  # there is a state to resume from
        self._first_workers = workers
        self._run = run = RunState()
        self._update = update = PendingUpdate()
        self._dispatcher = Dispatcher(minibatches, plan.local_steps)
        self._membership = Membership(run, self._dispatcher, update, failure_detector or FailureDetector())
        self._workers = self._membership.table.workers
        noise = NoiseTracker(settings.noise, has_steps=plan.allreduce is None) if settings.noise else None
        self._scaling = StepScaling(settings.learning_rate, settings.schedule, noise)
        self._phases = PhaseRunner(
            run=run, plan=plan, membership=self._membership, update=update, scaling=self._scaling, settings=settings
        )
        self._monitor = StopMonitor(stop, workers, settings.per_epoch)
        every = settings.evaluate_every
        self._evaluations = EvaluationSchedule(every) if every is not None else None
        self._admission = GradientAdmission(
            run=run,
            update=update,
            membership=self._membership,
            phases=self._phases,
            scaling=self._scaling,
            monitor=self._monitor,
            has_server=plan.allreduce is None,
        )
        self._updates = UpdateRunner(
            run=run,
            update=update,
            admission=self._admission,
            membership=self._membership,
            phases=self._phases,
            scaling=self._scaling,
            monitor=self._monitor,
            evaluations=self._evaluations,
        )
        self._timer_set_s = stop.seconds  # end of the run for which a timer was asked for

    # --- what engines ask ---------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Number of updates made."""
        return self._run.version

    @property
    def workload(self) -> int:
        """Number of gradients applied."""
        return self._run.workload

    @property
    def live_workers(self) -> list[int]:
        """Workers that take part."""
        return self._membership.table.active()

    @property
    def stopped(self) -> bool:
        """Whether the run has ended."""
        return self._run.stopped

    @property
    def awaits_step(self) -> bool:
        """Whether an update was made whose step is not known yet."""
        return self._run.awaits_step

    @property
    def is_limited(self) -> bool:
        """Whether the number of minibatches is limited."""
        return self._dispatcher.is_limited

    @property
    def joining(self) -> frozenset[int]:
        """Workers that have joined during the update in progress, which does not wait for them."""
        return frozenset(self._update.joining)

    @property
    def accepted_draws(self) -> dict[int, int]:
        """Newest accepted draw of each worker; 0 for none."""
        return {worker: state.accepted for worker, state in self._workers.items()}

    @property
    def timeout_s(self) -> float:
        """Silence after which a worker may be declared lost, in seconds; inf for never, or while it is unknown."""
        return self._membership.detector.timeout_s

    @property
    def compensators(self) -> tuple[Compensator, ...]:
        """Corrections of stale gradients in this phase."""
        return self._phases.compensators

    def would_accept(self, worker: int, draw: int) -> bool:
        """Return whether this gradient would be accepted if it arrived now and were finite."""
        state = self._workers[worker]
        is_current = state.status is BUSY and state.draw == draw
        return is_current and self._run.version - state.version <= self._phases.protocol.max_staleness

    def expected_update(self) -> events.Apply:
        """Return the next update as it would be if every busy worker contributed to it."""
        run, table = self._run, self._membership.table
        expected = tuple(
            events.Accept(worker=worker, draw=state.draw, staleness=0, samples=1)
            for worker, state in table.in_flight.items()
        )
        scales = self._scaling.scales(len(expected) or 1, table.live, run.workload)
        return events.Apply(
            version=run.version + 1,
            gradients=expected,
            lr_scale=scales.lr,
            reason="expected",
            weight_decay_scale=scales.weight_decay,
        )

    def expected_work(self) -> dict[int, events.Compute]:
        """Return the work of the next version by worker, if every busy worker contributed to it."""
        return self._dispatcher.expected_work(self._run.version + 1)

    # --- events -------------------------------------------------------------------------------------------

    def begin(self, now: float = 0.0) -> list[events.Command]:
        """Open the first update with all workers, or resume from a state that was loaded."""
        run = self._run
        commands: list[events.Command] = []
        run.commands = commands
        if self.has_begun:
            self._resume()
            return commands
        run.now = now
        self.has_begun = True
        self._dispatcher.admit(range(self._first_workers))
        self._set_timers()
        self._phases.enter_next()
        self._updates.open()
        return commands

    def handle(self, event: events.Event) -> list[events.Command]:
        """Return the commands that answer an event, in order."""
        run = self._run
        commands: list[events.Command] = []
        run.commands = commands
        if run.stopped and type(event) is not events.Restarted:
            return commands
        run.now = event.now
        if type(event) is events.Arrival:  # almost every event, so it is looked for first
            self._admission.arrive(event)
        else:
            self._handle_rare(event)
        if not run.stopped:
            self._updates.settle()
        return commands

    def prepare(self) -> None:
        """Do work of the next decision that does not depend on its event; without this call it decides the same."""
        self._phases.prepare()

    def _handle_rare(self, event: events.Event) -> None:
        match event:
            case events.UpdateApplied():
                self._updates.finish_measured(event)
            case events.Timer():
                self._handle_timer()
            case events.Joined():
                self._membership.join(event.worker)
            case events.Lost():
                self._membership.lose(event.worker, is_failure=event.reason not in events.NO_FAILURES)
            case events.Evaluated():
                self._handle_evaluation(event)
            case events.AbortRun():
                self._run.end(events.EndRun(event.outcome, event.reason))
            case events.Restarted():
                self._restart(event.workers)

    def _handle_timer(self) -> None:
        run = self._run
        end = self._monitor.at(run.now)
        if end is not None:
            run.end(end, cut_short="timer")
            return
        if self._phases.check() and self._phases.has_controllers:
            self._phases.ask("open")  # the update in progress is the first one of the phase
        if self._membership.is_deserted:
            run.end(
                events.EndRun(events.Outcome.NO_WORKERS, "every worker is lost, and none has come back"),
                cut_short="timer",
            )
            return
        self._membership.lose_silent()
        self._phases.ask_at_timer()

    def _handle_evaluation(self, event: events.Evaluated) -> None:
        if self._evaluations is not None:
            self._evaluations.end()
        end = self._monitor.after_evaluation(event.version, event.metrics)
        if end is not None:
            self._run.end(end, cut_short=event)

    def _set_timers(self) -> None:
        if self._monitor.seconds is not None:
            self._run.set_timer(self._monitor.seconds)
        self._phases.set_timers()

    # --- checkpoint and restart ---------------------------------------------------------------------------

    @property
    def _parts(self) -> dict[str, Any]:
        """Parts with a state, in the order in which they are loaded."""
        parts = {
            "run": self._run,
            "phases": self._phases,
            "membership": self._membership,
            "update": self._update,
            "scaling": self._scaling,
            "monitor": self._monitor,
            "evaluations": self._evaluations,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a coordinator of the same plan needs to resume."""
        return {
            "seconds": self._monitor.seconds,
            "is_limited": self.is_limited,
            **{name: part.state_dict() for name, part in self._parts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load such a state; if the plan is another one, its first phase begins at `Restarted`.

        Raises:
            ValueError: no run has such a state.
        """
        self.has_begun = True
        self._timer_set_s = state["seconds"]
        for name, part in self._parts.items():
            if name != "evaluations" or name in state:  # the run before may have had none
                part.load_state_dict(state[name])
        self._update.check_quorum(self._phases.protocol)

    def _resume(self) -> None:
        """Do what the end of the run has cut short; this may end it again."""
        run = self._run
        run.stopped = False
        self._dispatcher.is_due |= self.is_limited  # there may be more epochs now
        if self._monitor.seconds is not None and self._monitor.seconds != self._timer_set_s:
            run.set_timer(self._monitor.seconds)
        cut_short, run.cut_short = run.cut_short, None
        if cut_short == "update":
            self._updates.check_stop()
        elif cut_short == "timer":
            self._handle_timer()
        elif cut_short:
            self._handle_evaluation(cut_short)
        for worker, state in self._workers.items():  # an end by rejected gradients is not noted in `cut_short`
            if not run.stopped:
                self._admission.check_rejections(worker, state)
        if not run.stopped:
            self._updates.settle()

    def _restart(self, workers: int) -> None:
        """Assign all work again, to these workers."""
        run, phases = self._run, self._phases
        is_new_plan = phases.is_before_first
        # The controllers of a new plan do not include the one that excluded a worker.
        self._membership.cancel_all(workers, lose_excluded=is_new_plan)
        if is_new_plan:
            phases.enter_next()
            phases.check()
        self._membership.join_all(workers)
        # After an update that was cut short, `check_stop` opens the next one, and asks then.
        if is_new_plan and phases.has_controllers and run.cut_short != "update":
            phases.ask("open")
        self._dispatcher.is_due = True
        self._timer_set_s = self._monitor.seconds
        self._set_timers()
        self._membership.reset_timers()
        if self._evaluations is not None and self._evaluations.is_running:
            run.commands.append(events.Evaluate(run.version))
        self._resume()
