"""Membership: joining, loss, exclusion and timeouts of workers, and work for idle ones."""

from __future__ import annotations

from math import inf

from paceline.coordinator.dispatcher import Dispatcher
from paceline.coordinator.failure_detector import FailureDetector
from paceline.coordinator.pending_update import PendingUpdate
from paceline.coordinator.run_state import RunState
from paceline.coordinator.worker_table import BUSY, EXCLUDED, IDLE, LOST, PROBED, WorkerState, WorkerStatus
from paceline.core.events import Interrupt
from paceline.utils.state_dict import Stateful

SILENT = "lost"
EXCLUDED_KIND = "set_aside"
READMITTED_KIND = "take_back"


class Membership(Stateful):
    """Adds workers to a run, removes them, and gives work to those that may start.

    Args:
        run: shared state.
        dispatcher: assigns work.
        update: update in progress.
        detector: timeout on silent workers.

    Attributes:
        dispatcher: assigns work.
        table: status of every worker.
        detector: timeout on silent workers.
    """

    _saved = ("no_workers_until_s",)
    _parts = ("dispatcher", "detector")

    def __init__(self, run: RunState, dispatcher: Dispatcher, update: PendingUpdate, detector: FailureDetector) -> None:
        self.dispatcher = dispatcher
        self.table = dispatcher.table
        self.detector = detector
        self._run = run
        self._update = update
        self._idle = self.table.idle
        self._in_flight = self.table.in_flight
        self._no_workers_until_s = inf  # when the run ends if no lost worker has come back

    # --- work ---------------------------------------------------------------------------------------------

    def refill(self) -> None:
        """Give work to every idle worker that may start."""
        self.dispatcher.is_due = False
        for worker in list(self._idle):
            self.give_if_allowed(worker)

    def give_if_allowed(self, worker: int) -> None:
        """Give work to an idle worker if it may start."""
        run, dispatcher = self._run, self.dispatcher
        if dispatcher.may_start(worker, run.version):
            run.commands.append(dispatcher.give(worker, run.version, run.workload, run.now))
            if (
                dispatcher.is_restricted and dispatcher.iterations.are_several
            ):  # it may have been elsewhere in its iteration
                dispatcher.iterations.waiting.discard(worker)
                self._update.wait_again(worker)
            if self.detector.needs_timer:
                self._set_timeout()

    # --- joining and leaving ------------------------------------------------------------------------------

    def join(self, worker: int) -> None:
        """Add a worker; one that is still believed to be there loses its work first."""
        if self.table.status(worker) in {IDLE, BUSY}:
            self.lose(worker, is_failure=True)
        self.dispatcher.admit([worker])
        self._no_workers_until_s = inf
        self._update.joining.add(worker)
        self.dispatcher.is_due = True

    def lose(self, worker: int, *, is_failure: bool) -> None:
        """Remove a worker that is gone; its failures shorten its timeout."""
        if is_failure:
            self.detector.add_loss(worker)
        status = self.table.status(worker)
        if status in {EXCLUDED, PROBED}:
            self.table.workers[worker].status = LOST
        elif status is not LOST:
            self._remove(worker, LOST)

    def exclude(self, worker: int, state: WorkerState, reason: str) -> None:
        """Exclude a live worker, unless it is the last one."""
        if state.status not in {IDLE, BUSY}:
            return
        if self.table.live == 1:
            self._run.decide("kept", f"worker {worker}, the last one, in spite of: {reason}", worker)
            return
        self._run.decide(EXCLUDED_KIND, f"worker {worker}: {reason}", worker)
        if state.status is BUSY:
            self._run.commands.append(self.dispatcher.cancel(worker, state))
        self._remove(worker, EXCLUDED)

    def readmit(self, worker: int, state: WorkerState, reason: str) -> None:
        """Add an excluded worker again."""
        if state.status not in {EXCLUDED, PROBED}:
            return
        self._run.decide(READMITTED_KIND, f"worker {worker}: {reason}", worker)
        if state.status is PROBED:
            self._run.commands.append(Interrupt(worker, state.draw))
        self.join(worker)

    def _remove(self, worker: int, status: WorkerStatus) -> None:
        self.dispatcher.remove(worker, status)
        self._update.leave(worker)

    # --- timeouts -----------------------------------------------------------------------------------------

    @property
    def is_deserted(self) -> bool:
        """Whether every worker is lost and the time for one to come back has passed."""
        return not self.table.live and self._run.now >= self._no_workers_until_s

    def observe(self, worker: int, round_trip_s: float) -> None:
        """Adapt the timeout to a round trip, in seconds."""
        if change := self.detector.observe(worker, round_trip_s):
            self._run.decide("worker_timeout", change)
        if self.detector.needs_timer:
            self._set_timeout()

    def lose_silent(self) -> None:
        """Declare workers lost whose timeout has expired, if the timer of the timeout is due."""
        now = self._run.now
        if not self.detector.is_due(now):
            return
        for worker, timeout in self.detector.expired(self._in_flight, now).items():
            self._run.decide(SILENT, f"worker {worker}: silent for {timeout}", worker)
            self.lose(worker, is_failure=False)  # it may be a false alarm
            if not self.table.live:
                self._no_workers_until_s = now + self.detector.timeout_s
                self._run.set_timer(self._no_workers_until_s)
        self._set_timeout()

    def _set_timeout(self) -> None:
        if self._in_flight and self.detector.timeout_s < inf:
            self._run.set_timer(self.detector.arm(self._in_flight, self._run.now))

    # --- checkpoint and restart ---------------------------------------------------------------------------

    def cancel_all(self, workers: int, *, lose_excluded: bool) -> None:
        """Cancel all work, and remove workers that the resumed run does not have.

        Args:
            workers: number of workers of the resumed run.
            lose_excluded: whether excluded workers are removed too, so that they join again.
        """
        self.dispatcher.cancel_all()
        for worker, state in list(self.table.workers.items()):
            if worker >= workers or (lose_excluded and state.status is EXCLUDED):
                self.lose(worker, is_failure=False)

    def join_all(self, workers: int) -> None:
        """Add every worker below this number that is lost."""
        for worker in range(workers):
            if self.table.status(worker) is LOST:
                self.join(worker)

    def reset_timers(self) -> None:
        """Ask again for the timers that a restart has discarded."""
        self.detector.disarm()
        if self._no_workers_until_s < inf:
            self._run.set_timer(self._no_workers_until_s)
