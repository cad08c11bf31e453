"""Updates made of the gradients that are accepted."""

from __future__ import annotations

from math import inf

from paceline.coordinator.admission import GradientAdmission
from paceline.coordinator.evaluation_schedule import EvaluationSchedule
from paceline.coordinator.lease_queue import LeaseQueue
from paceline.coordinator.membership import Membership
from paceline.coordinator.pending_update import PendingUpdate
from paceline.coordinator.phases import PhaseRunner
from paceline.coordinator.run_state import RunState
from paceline.coordinator.step_scaling import StepScaling
from paceline.core import events
from paceline.core.stop import StopMonitor
from paceline.utils.wording import counted

EVERY_SAMPLE = "every sample is used"
NO_OTHER_WORKER = "no other live worker can contribute"


class UpdateRunner:
    """Makes an update when one is due, and opens the next one.

    Args:
        run: shared state.
        update: update in progress.
        admission: admission of gradients to it.
        membership: workers and their work.
        phases: protocol in force and controllers.
        scaling: learning-rate scale.
        monitor: conditions that end the run.
        evaluations: when a version is evaluated; None for never.
    """

    def __init__(
        self,
        run: RunState,
        update: PendingUpdate,
        admission: GradientAdmission,
        membership: Membership,
        phases: PhaseRunner,
        scaling: StepScaling,
        monitor: StopMonitor,
        evaluations: EvaluationSchedule | None,
    ) -> None:
        self._run = run
        self._update = update
        self._admission = admission
        self._membership = membership
        self._dispatcher = membership.dispatcher
        self._table = table = membership.table
        self._idle = table.idle
        self._in_flight = table.in_flight
        self._phases = phases
        self._scaling = scaling
        self._monitor = monitor
        self._evaluations = evaluations

    def settle(self) -> None:
        """Make the update if it is due, and give work to workers that the current event has freed."""
        update, dispatcher, admission = self._update, self._dispatcher, self._admission
        if update.skipped is not None:
            self._make_skipped(*update.skipped)
        elif dispatcher.queue is not None:
            self._settle_leases(dispatcher.queue)
        elif reason := update.due():
            self._make(reason)
        # No update waits for a worker that has joined during it (decision 0002).
        elif update.held and update.joining and not self._others_can_contribute():
            self._make(NO_OTHER_WORKER)
        elif dispatcher.is_due:
            self._membership.refill()
        elif admission.delivered is not None and admission.delivered in self._idle:  # not excluded meanwhile
            self._membership.give_if_allowed(admission.delivered)
        admission.delivered = None
        if not self._in_flight and dispatcher.queue is None and not self._run.awaits_step:
            self._settle_without_work()

    def _settle_without_work(self) -> None:
        """Make the update if nothing is under way any more, or end the run without further data."""
        update, dispatcher = self._update, self._dispatcher
        if dispatcher.iterations.are_several and not (update.held or self._run.stopped):
            dispatcher.iterations.begin_update()  # without one: all loops have gone on
            self._membership.refill()
        is_limited = dispatcher.is_limited
        # Workers without a minibatch are not awaited, so the last update may be smaller (decision 0002).
        if update.held and not self._in_flight and (is_limited or not update.awaited):
            self._make(NO_OTHER_WORKER)
        if is_limited and not (update.held or self._in_flight or self._run.stopped or self._run.awaits_step):
            self._run_out_of_data()

    def _settle_leases(self, queue: LeaseQueue) -> None:
        """Make the update if each of its samples is used, and else give the next leases."""
        overtaken, self._admission.overtaken = self._admission.overtaken, None
        if not queue.is_done:
            if self._dispatcher.is_due:
                self._membership.refill()
            for worker in (self._admission.delivered, overtaken):  # else an idle worker has found nothing before
                if worker is not None and worker in self._idle:
                    self._membership.give_if_allowed(worker)
        elif self._update.held:
            self._make(EVERY_SAMPLE)
        elif not self._run.awaits_step:  # the loops have skipped all leases
            self.open()

    def _others_can_contribute(self) -> bool:
        """Return whether a worker that did not join during this update is busy or may start."""
        may_start = (worker for worker in self._idle if self._dispatcher.may_start(worker, self._run.version))
        return bool(self._update.awaited) or not self._update.joining.issuperset([*self._in_flight, *may_start])

    def _make(self, reason: str) -> None:
        run, phases = self._run, self._phases
        gradients, step_scale = self._update.take()
        minibatches = 0 if self._dispatcher.queue is None else self._dispatcher.queue.minibatches
        k = minibatches or len(gradients)
        run.version += 1
        needs_step = self._follow_noise(gradients, minibatches) if self._scaling.noise is not None else False
        scales = self._scaling.scales(k, self._table.live, run.workload)
        limit = phases.momentum_limit() if phases.limits_momentum else inf
        run.workload += minibatches or sum([gradient.minibatches for gradient in gradients])
        run.update_size = k
        measures = phases.measures_steps or needs_step
        run.commands.append(
            tuple.__new__(  # all fields in order, as in `Accept.of`
                events.Apply,
                (
                    run.version,
                    gradients,
                    scales.lr,
                    reason,
                    measures,
                    step_scale,
                    limit,
                    scales.weight_decay,
                    self._scaling.momentum_power(k),
                    minibatches,
                    False,
                ),
            )
        )
        run.awaits_step = measures
        if not measures:
            self.check_stop()

    def _make_skipped(self, reason: str, minibatches: int) -> None:
        """Make an update without a step, as DistributedDataParallel does with a GradScaler after an overflow."""
        run = self._run
        self._update.skipped = None
        scales = self._scaling.scales(minibatches, self._table.live, run.workload)
        run.version += 1
        run.workload += minibatches
        run.update_size = minibatches
        run.commands.append(
            events.Apply(
                version=run.version,
                gradients=(),
                lr_scale=scales.lr,
                reason=reason,
                minibatches=minibatches,
                is_skipped=True,
            )
        )
        self.check_stop()

    def _follow_noise(self, gradients: tuple[events.Accept, ...], minibatches: int) -> bool:
        """Pass the update that is made now to the learning-rate rule "noise"; return whether it needs the step."""
        noise, run = self._scaling.noise, self._run
        assert noise is not None
        stalenesses = tuple(each.staleness for each in gradients)
        noise.make(stalenesses, self._scaling.schedule_scale(run.workload), minibatches)
        if numbers := noise.change():
            run.decide("learning_rate", noise.explanation, numbers=numbers)
        return noise.needs_step()

    def finish_measured(self, event: events.UpdateApplied) -> None:
        """Finish an update whose step was measured."""
        self._run.awaits_step = False
        self._phases.step = event.step
        if self._scaling.noise is not None:
            self._scaling.noise.finish(event.step)
        self.check_stop()

    def check_stop(self) -> None:
        """End the run, or finish the update that was just made and open the next one."""
        run = self._run
        end = self._monitor.after_update(run.version, run.workload)
        iterations = self._dispatcher.iterations
        if end is not None and not iterations.defers(end):
            run.end(end, cut_short="update")
            return
        if self._evaluations is not None and self._evaluations.is_due(run.version, run.workload, run.now):
            run.commands.append(events.Evaluate(run.version))
        self._phases.check()
        self._interrupt_stale()
        self._update.joining.clear()
        if iterations.are_several:
            iterations.begin_update()
        self.open()

    def _interrupt_stale(self) -> None:
        """Interrupt work that would be too stale; always that of joining workers, which the next update awaits."""
        protocol = self._phases.protocol
        if protocol.on_update == "interrupt":
            of = None
        elif self._update.joining:
            of = self._update.joining
        else:
            return
        oldest = self._run.version - protocol.max_staleness
        self._phases.interrupt(self._dispatcher.cancel_older_than(oldest, of))

    def open(self) -> None:
        """Open the next update."""
        self._update.open(self._run.now)
        self._dispatcher.begin_update()
        if self._phases.has_controllers:
            self._phases.ask("open")
        self._phases.step = None
        self._membership.refill()
        self._update.wait_for(self._in_flight.keys())

    def _run_out_of_data(self) -> None:
        """End the run if every minibatch was used; else let workers start that wait for one without data."""
        if self._dispatcher.are_data_used_up:
            workload = self._run.workload
            were = f"{counted(workload, 'gradient')} {'was' if workload == 1 else 'were'}"
            reason = f"every minibatch was dealt out; {were} applied, the others not finite"
            self._run.end(events.EndRun(events.Outcome.EPOCHS, reason))
        else:
            self._dispatcher.release_workers_without_data()
            self._membership.refill()
