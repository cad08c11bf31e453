"""Admission of gradients, and updates made of them."""

from __future__ import annotations

from math import inf

from paceline.coordinator.evaluation_schedule import EvaluationSchedule
from paceline.coordinator.lease_queue import LeaseQueue
from paceline.coordinator.membership import Membership
from paceline.coordinator.pending_update import PendingUpdate
from paceline.coordinator.phases import PhaseRunner
from paceline.coordinator.run_state import RunState
from paceline.coordinator.step_scaling import StepScaling
from paceline.coordinator.worker_table import BUSY, EXCLUDED, IDLE, NEVER, PROBED, WorkerState
from paceline.core import events
from paceline.core.stop import StopMonitor
from paceline.utils.wording import counted

STALE = "too stale"
EVERY_SAMPLE = "every sample is used"
NO_OTHER_WORKER = "no other live worker can contribute"
LATE_RETURN = "its worker had been declared lost"
PROBE = "only a probe of its worker"
REJECTIONS_IN_A_ROW = 10
SKIPS_IN_A_ROW = 50  # a GradScaler lowers its scale by a factor of 2 at each one


class UpdateRunner:
    """Accepts and drops gradients, makes an update when one is due, and opens the next one.

    Args:
        run: shared state.
        update: update in progress.
        membership: workers and their work.
        phases: protocol in force and controllers.
        scaling: learning-rate scale.
        monitor: conditions that end the run.
        evaluations: when a version is evaluated; None for never.
        has_server: whether updates are made by a server.
    """

    def __init__(
        self,
        run: RunState,
        update: PendingUpdate,
        membership: Membership,
        phases: PhaseRunner,
        scaling: StepScaling,
        monitor: StopMonitor,
        evaluations: EvaluationSchedule | None,
        has_server: bool,
    ) -> None:
        self._run = run
        self._update = update
        self._membership = membership
        self._dispatcher = membership.dispatcher
        self._table = table = membership.table
        self._workers = table.workers
        self._idle = table.idle
        self._in_flight = table.in_flight
        self._phases = phases
        self._scaling = scaling
        self._monitor = monitor
        self._evaluations = evaluations
        self._has_server = has_server
        self._adapts_timeout = membership.detector.observes
        self._delivered: int | None = None  # worker of the current arrival
        self._overtaken: int | None = None  # worker whose lease that arrival has ended

    # --- arrivals -----------------------------------------------------------------------------------------

    def arrive(self, event: events.Arrival) -> None:
        """Accept or drop a gradient."""
        worker = self._workers[event.worker]
        if event.draw != worker.draw or worker.status is not BUSY:
            self._arrive_unexpectedly(event, worker)
            return
        run, phases = self._run, self._phases
        staleness = run.version - worker.version
        if self._adapts_timeout:
            self._membership.observe(event.worker, event.complete_s - worker.started_s)
        self._dispatcher.deliver(event.worker, worker)
        accepted = False
        if not event.measured.finite:
            self._reject(event, worker, staleness)
        elif staleness > phases.protocol.max_staleness:
            self._drop(event, staleness, STALE)
            self._dispatcher.return_minibatch(event.worker, worker)
        elif event.is_notice:  # the protocol has changed since then
            self._drop(event, staleness, events.NOTICE)
            self._dispatcher.return_minibatch(event.worker, worker)
        else:
            accepted = True
            self._accept(event, worker, staleness)
        self._delivered = event.worker
        if phases.has_controllers and not run.stopped:
            phases.ask(
                "arrival",
                arrival=event,
                busy_s=_busy_s(event, worker),
                trip_s=event.complete_s - worker.started_s,
                staleness=staleness,
                accepted=accepted,
                share=worker.share,
            )

    def _accept(self, event: events.Arrival, worker: WorkerState, staleness: int) -> None:
        command = events.Accept.of(event, staleness)
        self._run.commands.append(command)
        self._dispatcher.accept(worker, event.draw, event.measured.minibatches)
        self._update.hold(command)
        if self._dispatcher.queue is not None:
            self._end_lease(event.worker)
        worker.contributed_to = self._run.version
        worker.rejections = worker.skips = 0
        self._monitor.accept(event.measured.loss, event.measured.samples)
        if self._scaling.noise is not None:
            self._scaling.noise.accept(event.measured)
        if self._scaling.schedule is not None and (reason := self._scaling.schedule.accept(event.measured.loss)):
            self._run.decide("warm_up", reason)

    def _end_lease(self, number: int) -> None:
        """End the lease of a worker, if it has one, and interrupt the worker that has a copy."""
        if (interrupt := self._dispatcher.end_lease(number)) is not None:
            self._run.commands.append(interrupt)
            self._phases.note_interrupted([interrupt.worker])
            self._overtaken = interrupt.worker

    def _reject(self, event: events.Arrival, worker: WorkerState, staleness: int) -> None:
        # The minibatch is not returned: it would break the next gradient too.
        measured = event.measured
        reason = events.OVERFLOW if measured.overflowed else events.SKIPPED if measured.skipped else events.NOT_FINITE
        self._drop(event, staleness, reason)
        if measured.skipped:
            worker.skips += 1
        else:
            worker.rejections += 1
        if self._phases.sets_shares and reason != events.SKIPPED and not staleness:
            self._skip_update(event.worker)
        else:
            self._end_lease(event.worker)
        if not self._has_server:
            self._update_without(event.worker, worker)
        self.check_rejections(event.worker, worker)

    def _skip_update(self, worker: int) -> None:
        """Drop all gradients of the update in progress, of which each worker has a part, and what is under way."""
        interrupts = self._dispatcher.use_up()
        self._run.commands += interrupts
        queue = self._dispatcher.queue
        minibatches = len(self._update.held) + 1 + len(interrupts) if queue is None else queue.minibatches
        self._update.skip(f"skipped, because the gradient of worker {worker} is not finite", minibatches)

    def _update_without(self, number: int, worker: WorkerState) -> None:
        """Make the update without this worker; if no other worker is left, all compute this update again."""
        worker.contributed_to = self._run.version
        self._update.awaited.discard(number)
        if not (self._update.held or self._update.awaited):
            for each in self._table.active():
                self._workers[each].contributed_to = NEVER
                self._update.awaited.add(each)
            self._dispatcher.is_due = True

    def check_rejections(self, worker: int, state: WorkerState) -> None:
        """End the run if too many gradients in a row of a worker were not finite."""
        if state.skips >= SKIPS_IN_A_ROW:
            reason = (
                f"{state.skips} steps in a row were skipped by the loop of worker {worker}, the last at update "
                f"{self._run.version}; lower the learning rate or check the data"
            )
            self._run.end(events.EndRun(events.Outcome.NOT_FINITE, reason))
        elif state.rejections >= REJECTIONS_IN_A_ROW:
            reason = (
                f"{state.rejections} gradients in a row of worker {worker} were not finite, the last at "
                f"update {self._run.version}; lower the learning rate, clip gradients (clip_norm=) or check the data"
            )
            self._run.end(events.EndRun(events.Outcome.NOT_FINITE, reason))

    def _drop(self, event: events.Arrival, staleness: int | None, reason: str) -> None:
        self._run.commands.append(events.Drop(event.worker, event.draw, staleness, reason))

    def _arrive_unexpectedly(self, event: events.Arrival, worker: WorkerState) -> None:
        """Drop a gradient of cancelled work, of a probe, or of a worker that was declared lost."""
        run = self._run
        staleness = run.version - worker.version
        if event.draw != worker.draw or worker.status in {IDLE, EXCLUDED}:
            self._drop(event, None, events.OLD_DRAW)
        elif worker.status is PROBED:
            self._drop(event, staleness, PROBE)
            worker.status = EXCLUDED
            self._phases.ask("arrival", arrival=event, busy_s=_busy_s(event, worker), staleness=staleness)
        else:
            self._membership.observe(event.worker, event.now - worker.started_s)  # its timeout was too short
            self._drop(event, staleness, LATE_RETURN)
            self._membership.join(event.worker)

    # --- updates ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Make the update if it is due, and give work to workers that the current event has freed."""
        update, dispatcher = self._update, self._dispatcher
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
        elif self._delivered is not None and self._delivered in self._idle:  # not excluded meanwhile
            self._membership.give_if_allowed(self._delivered)
        self._delivered = None
        if dispatcher.queue is not None:
            return
        is_limited = dispatcher.is_limited
        # Workers without a minibatch are not awaited, so the last update may be smaller (decision 0002).
        if update.held and not self._in_flight and (is_limited or not update.awaited) and not self._run.awaits_step:
            self._make(NO_OTHER_WORKER)
        if is_limited and not (update.held or self._in_flight or self._run.stopped or self._run.awaits_step):
            self._run_out_of_data()

    def _settle_leases(self, queue: LeaseQueue) -> None:
        """Make the update if each of its samples is used, and else give the next leases."""
        overtaken, self._overtaken = self._overtaken, None
        if not queue.is_done:
            if self._dispatcher.is_due:
                self._membership.refill()
            for worker in (self._delivered, overtaken):  # else an idle worker has found nothing before
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
        needs_step = self._follow_noise(gradients) if self._scaling.noise is not None else False
        scales = self._scaling.scales(k, self._table.live, run.workload)
        limit = phases.momentum_limit() if phases.limits_momentum else inf
        run.workload += minibatches or sum([gradient.minibatches for gradient in gradients])
        run.update_size = k
        measures = phases.measures_steps or needs_step
        run.commands.append(
            events.Apply.__new__(  # half the time of a call of the class with keywords, as in `Accept.of`
                events.Apply,
                version=run.version,
                gradients=gradients,
                lr_scale=scales.lr,
                reason=reason,
                measure=measures,
                step_scale=step_scale,
                momentum_limit=limit,
                weight_decay_scale=scales.weight_decay,
                momentum_power=self._scaling.momentum_power(k),
                minibatches=minibatches,
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

    def _follow_noise(self, gradients: tuple[events.Accept, ...]) -> bool:
        """Pass the update that is made now to the learning-rate rule "noise"; return whether it needs the step."""
        noise, run = self._scaling.noise, self._run
        assert noise is not None
        noise.make(tuple(each.staleness for each in gradients), self._scaling.schedule_scale(run.workload))
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
        if end is not None:
            run.end(end, cut_short="update")
            return
        if self._evaluations is not None and self._evaluations.is_due(run.version, run.workload, run.now):
            run.commands.append(events.Evaluate(run.version))
        self._phases.check()
        self._interrupt_stale()
        self._update.joining.clear()
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
        interrupts = self._dispatcher.cancel_older_than(oldest, of)
        self._run.commands += interrupts
        if interrupts and self._phases.has_controllers:
            self._phases.note_interrupted(interrupt.worker for interrupt in interrupts)

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


def _busy_s(event: events.Arrival, worker: WorkerState) -> float:
    """Return the seconds that the worker has measured, or else those of the round trip."""
    measured_s = event.pull_s + event.measured.compute_s + event.push_s
    return measured_s + (event.complete_s - event.now) if measured_s else event.complete_s - worker.started_s
