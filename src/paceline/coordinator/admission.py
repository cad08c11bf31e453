"""Admission of gradients: which are accepted, and what becomes of the others."""

from __future__ import annotations

from paceline.coordinator.membership import Membership
from paceline.coordinator.pending_update import PendingUpdate
from paceline.coordinator.phases import PhaseRunner
from paceline.coordinator.run_state import RunState
from paceline.coordinator.step_scaling import StepScaling
from paceline.coordinator.worker_table import BUSY, EXCLUDED, IDLE, NEVER, PROBED, WorkerState
from paceline.core import events
from paceline.core.gradient import NO_STEP, StepPlace
from paceline.core.stop import StopMonitor

STALE = "too stale"
LATE_RETURN = "its worker had been declared lost"
OTHER_STEP = "of another step of the loop than the update"
NO_BATCH = "none, as its loop waits for a batch"
AFTER_LAST_ITERATION = "after the last iteration"
PROBE = "only a probe of its worker"
REJECTIONS_IN_A_ROW = 10
SKIPS_IN_A_ROW = 50  # a GradScaler lowers its scale by a factor of 2 at each one


class GradientAdmission:
    """Accepts and drops the gradients that arrive.

    Args:
        run: shared state.
        update: update in progress.
        membership: workers and their work.
        phases: protocol in force and controllers.
        scaling: learning-rate scale.
        monitor: conditions that end the run.
        has_server: whether updates are made by a server.

    Attributes:
        delivered: worker of the current arrival; None for another event.
        overtaken: worker whose lease that arrival has ended; None for none.
    """

    def __init__(
        self,
        run: RunState,
        update: PendingUpdate,
        membership: Membership,
        phases: PhaseRunner,
        scaling: StepScaling,
        monitor: StopMonitor,
        has_server: bool,
    ) -> None:
        self.delivered: int | None = None
        self.overtaken: int | None = None
        self._run = run
        self._update = update
        self._membership = membership
        self._dispatcher = membership.dispatcher
        self._iterations = membership.dispatcher.iterations
        self._table = membership.table
        self._workers = membership.table.workers
        self._phases = phases
        self._scaling = scaling
        self._monitor = monitor
        self._has_server = has_server
        self._adapts_timeout = membership.detector.observes

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
        step_place = event.measured.step_place
        if step_place is not None and self._is_elsewhere(event, worker, step_place):
            pass
        elif not event.measured.finite:
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
        self.delivered = event.worker
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

    def _is_elsewhere(self, event: events.Arrival, worker: WorkerState, step_place: StepPlace) -> bool:
        """Drop a gradient of a loop with several optimizers if the update in progress is of another step."""
        iterations = self._iterations
        self._dispatcher.begin_iterations()
        staleness = self._run.version - worker.version
        end = iterations.end if event.measured.minibatches else None
        if end is not None:
            reason = AFTER_LAST_ITERATION
        elif step_place == NO_STEP:
            reason = NO_BATCH
            iterations.waiting.add(event.worker)
        elif self._phases.protocol.max_staleness:
            return False
        elif staleness:
            iterations.pass_by(event.worker, step_place)
            self._update.awaited.discard(event.worker)
            return False
        elif iterations.admits(event.worker, step_place, self._table.active()):
            return False
        else:
            reason = OTHER_STEP
            self._update.awaited.discard(event.worker)
        self._drop(event, staleness, reason)
        self._dispatcher.return_minibatch(event.worker, worker)
        if end is not None:
            self._run.end(end)
        return True

    def _accept(self, event: events.Arrival, worker: WorkerState, staleness: int) -> None:
        command = events.Accept.of(event, staleness)
        self._run.commands.append(command)
        self._dispatcher.accept(event.worker, worker, event.draw, event.measured.minibatches)
        self._update.hold(command)
        if self._dispatcher.queue is not None:
            self._end_lease(event.worker)
        worker.contributed_to = self._run.version
        worker.rejections = worker.skips = 0
        self._monitor.accept(event.measured.loss, event.measured.samples)
        if self._scaling.noise is not None:
            self._scaling.noise.accept(event.measured, worker.share)
        if self._scaling.schedule is not None and (reason := self._scaling.schedule.accept(event.measured.loss)):
            self._run.decide("warm_up", reason)

    def _end_lease(self, number: int) -> None:
        """End the lease of a worker, if it has one, and interrupt the worker that has a copy."""
        if (interrupt := self._dispatcher.end_lease(number)) is not None:
            self._phases.interrupt([interrupt])
            self.overtaken = interrupt.worker

    def _reject(self, event: events.Arrival, worker: WorkerState, staleness: int) -> None:
        # A minibatch that was read is not returned: it would break the next gradient too.
        measured = event.measured
        is_read = measured.minibatches > 0
        reason = events.OVERFLOW if measured.overflowed else events.SKIPPED if measured.skipped else events.NOT_FINITE
        self._drop(event, staleness, reason)
        if measured.skipped:
            worker.skips += 1
        else:
            worker.rejections += 1
        if self._are_cut and reason != events.SKIPPED and not staleness:
            self._skip_update(event.worker, is_read=is_read)
        else:
            self._end_lease(event.worker)
        if measured.step_place is not None:  # its loop goes on to the next step
            self._update.awaited.discard(event.worker)
        if not is_read:
            self._dispatcher.return_minibatch(event.worker, worker)
        if not self._has_server:
            self._update_without(event.worker, worker)
        self.check_rejections(event.worker, worker)

    @property
    def _are_cut(self) -> bool:
        """Whether each gradient of the update in progress is one of a part of its samples."""
        phases = self._phases
        is_queue = self._dispatcher.queue is not None or phases.protocol.refill == "share"
        return is_queue or phases.controllers.has_one_share

    def _skip_update(self, worker: int, *, is_read: bool) -> None:
        """Drop all gradients of the update in progress, of which each worker has a part, and what is under way."""
        interrupts = self._dispatcher.use_up(are_read=is_read)
        self._run.commands += interrupts
        queue = self._dispatcher.queue
        minibatches = len(self._update.held) + 1 + len(interrupts) if queue is None else queue.minibatches
        reason = f"skipped, because the gradient of worker {worker} is not finite"
        self._update.skip(reason, minibatches if is_read else 0)

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


def _busy_s(event: events.Arrival, worker: WorkerState) -> float:
    """Return the seconds that the worker has measured, or else those of the round trip."""
    measured_s = event.pull_s + event.measured.compute_s + event.push_s
    return measured_s + (event.complete_s - event.now) if measured_s else event.complete_s - worker.started_s
