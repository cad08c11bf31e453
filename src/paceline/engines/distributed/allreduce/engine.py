"""Workers without a server on real ranks: each decides for itself, all alike, on the same numbers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from heapq import heappop, heappush
from math import inf, isnan
from types import TracebackType
from typing import Any, Self

import torch

from paceline.clusters.torchrun import Torchrun
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import (
    AbortRun,
    Accept,
    Apply,
    Arrival,
    Compensation,
    Compute,
    EndRun,
    Evaluate,
    Evaluated,
    Event,
    Interrupt,
    Outcome,
    RestartWorker,
    SetTimer,
    Timer,
    UpdateApplied,
)
from paceline.engines.base import Engine, Observer
from paceline.engines.distributed.allreduce.local_step import LocalStep, OverheadEstimator
from paceline.engines.distributed.allreduce.member import MembershipClient
from paceline.engines.distributed.allreduce.membership import MembershipServer
from paceline.engines.distributed.allreduce.messages import MembershipChanged, RunFinished, StepReport, StepSummary
from paceline.engines.distributed.rendezvous.handshake import RunOver
from paceline.engines.distributed.transport.process_group import CompletionTimer
from paceline.errors import UsageError, describe_error
from paceline.protocols.allreduce import AllReduceConfig
from paceline.worker.allreduce import AllReduceAlgorithm
from paceline.worker.replica import Replica


class AllReduceEngine(Engine):
    """Trains with all other ranks, of which each runs the same coordinator on the same events.

    An iteration: gradient; hand in; begin the sum; compute the next gradient meanwhile, if the allreduce lets it;
    hear what everybody has told of theirs; wait for the sum. Then all gradients arrive, in the order of the workers,
    newcomers first.

    All events have the time that rank 0 had when the last worker had told of its gradient. The wait for the sum is in
    what the next gradients tell as `pull_s`: for how long all have waited though every gradient was there. How long the
    sum itself has taken, rank 0 sees whatever it does meanwhile (`CompletionTimer`), and what is left over of the
    iteration besides (`OverheadEstimator`).

    Args:
        cluster: of which this process is a rank.
        seed: of the run.
        allreduce: what is summed, and when.
        replica: computes this rank's gradients, and at rank 0 the evaluations.
        worker: steps.
        agreement: what all ranks have to agree on.
    """

    def __init__(
        self,
        cluster: Torchrun,
        seed: int,
        allreduce: AllReduceConfig,
        replica: Replica,
        worker: AllReduceAlgorithm,
        agreement: dict[str, Any],
    ) -> None:
        super().__init__()
        self._cluster = cluster
        self._allreduce = allreduce
        self._replica = replica
        self._worker = worker
        self._number = cluster.worker
        self._part = LocalStep(cluster, seed, replica, worker)
        self._is_head = cluster.is_server
        self._circle = (
            MembershipServer(cluster, agreement, self._elapsed_s)
            if self._is_head
            else MembershipClient(cluster, agreement)
        )
        self._work: dict[int, Compute] = {}
        self._events: deque[Event] = deque()
        self._timers: list[float] = []
        self._asked: Evaluate | None = None
        self._iteration = 0
        self._behind: Apply | None = None  # made since the last sum; the average does not know of it
        self._has_taken_part = False
        self._is_to_reform = False
        self._waited_s = 0.0
        self._sum_s = self._left_over_s = 0.0
        self._pace = OverheadEstimator(allreduce, now=0.0)
        self._common_s = 0.0  # of the newest events
        self._begun_s = 0.0
        self._free_s = 0.0  # since when this rank has nothing to wait for
        self._threads = torch.get_num_threads()
        self.end: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Come together with all other ranks."""
        torch.set_num_threads(self._cluster.worker_threads)
        try:
            self._circle.open()
        except BaseException as error:
            self._close(error)
            raise
        super().__enter__()
        self._begun_s = time.monotonic() - self.now
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Part from all other ranks."""
        self._close(error)
        super().__exit__(kind, error, where)

    def run(self, coordinator: Coordinator, observe: Observer | None = None, first: Event | None = None) -> EndRun:
        """Run to the end and return what ended it, at rank 0; the others go on until rank 0 is there, too."""
        self._coordinator = coordinator
        try:
            first = self._begin([first] if first is not None else [])
            while True:
                stop = super().run(coordinator, observe, first)
                self._finish()
                if self._circle.is_over():
                    break
                first = self._form()
        except RunFinished as over:
            self.end = over.end
            if not self._has_taken_part:
                raise RunOver(over.end) from over
            if "error" in self.end:
                return EndRun(Outcome.FAILED, self.end["error"])
            return EndRun(Outcome(self.end["outcome"]), self.end["reason"])
        self.end = {"outcome": stop.outcome.value, "reason": stop.reason, "time_s": self.now}
        return stop

    def resume_at(self, version: int, now: float) -> None:
        """Begin at this time with what the worker's server holds as this version."""
        self.now = self._common_s = now

    # --- commands -----------------------------------------------------------------------------------------

    def compute(self, command: Compute) -> None:
        """Remember who does what."""
        self._work[command.worker] = command

    def interrupt(self, command: Interrupt) -> None:
        """Forget it."""
        self._work.pop(command.worker, None)

    def replace(self, command: RestartWorker) -> None:
        """Keep it: only who has started it can start another one in its place."""

    def accept(self, command: Accept) -> None:
        """Leave it: it is in the sum already."""

    def apply(self, command: Apply) -> None:
        """Take over the sum; where there was none, remember that."""
        self._behind = command
        self.is_settled = False
        self._worker.advance(command)
        if self._allreduce.communicates(self._iteration):
            self._take_over(adopts=True)
        self._tell_time()

    def evaluate(self, command: Evaluate) -> None:
        """Remember that it is asked for."""
        self._asked = command

    def wake(self, command: SetTimer) -> None:
        """Send a timer after the iteration in which that moment comes."""
        heappush(self._timers, command.at_s)

    # --- events -------------------------------------------------------------------------------------------

    def next_event(self) -> Event:
        """Go on until something has happened."""
        while not self._events:
            try:
                if self._asked is not None:
                    self._evaluate()
                elif self._is_to_reform:
                    raise MembershipChanged
                else:
                    self._iterate()
            except MembershipChanged:
                self._events.extend(self._take_on(self._circle.form(self._state, self._patience_s)))
        event = self._events.popleft()
        self.now = max(self.now, event.now)
        return event

    def _following(self) -> Event:
        """Return the next event; a signal comes to all ranks with the next iteration."""
        applied, self._applied = self._applied, None
        return applied if applied is not None else self.next_event()

    def _iterate(self) -> None:
        self._leave_on_sigterm()
        hand = self._part.hand_in(self._work.get(self._number), self.now, self._coordinator.expected_update())
        compute_s = hand.compute_s + time.monotonic() - self._free_s
        communicates = self._allreduce.communicates(self._iteration + 1)
        begun = self._circle.begin_sum(self._worker.payload) if communicates else []
        summed = CompletionTimer(begun)
        hand = hand._replace(generation=self._circle.generation, compute_s=compute_s)
        self._circle.hand_in(hand._replace(waited_s=self._waited_s, leaves=self._leaves))
        if self._allreduce.overlaps or not communicates:
            next_work = self._coordinator.expected_work().get(self._number)
            if next_work is not None:
                self._part.compute_ahead(next_work, self.now)
        since_s = time.monotonic()
        table = self._circle.table(self._patience_s)
        self._circle.wait(begun, self._patience_s)
        self._free_s = time.monotonic()
        self._waited_s = self._free_s - since_s if communicates else 0.0
        self._note_times(table, summed.at_s(self._free_s) - self._begun_s if communicates else None)
        self._iteration += 1
        self._report(table)

    def _note_times(self, table: StepSummary, summed_s: float | None) -> None:
        """Note how long the sum has taken, if there was one, and what else has taken time; only rank 0 knows."""
        compute_s = {worker: hand.compute_s for worker, hand in table.hands.items() if hand.draw}
        self._left_over_s = self._pace.handed_in(compute_s, table.now)
        self._sum_s = self._pace.summed(max(0.0, summed_s - table.now)) if summed_s is not None else 0.0

    def _leave_on_sigterm(self) -> None:
        """End this process alone, if the others go on without it (a spot notice)."""
        if self._leaves_alone and isinstance(self._circle, MembershipClient):
            self._circle.leave("SIGTERM")
            raise SystemExit(self._cluster.leaving_status)

    @property
    def _leaves_alone(self) -> bool:
        return self._cluster.elastic and not self._is_head and self.signals.caught == "SIGTERM"

    @property
    def _leaves(self) -> str:
        caught = "" if self._leaves_alone else self.signals.caught
        return f"interrupted by {caught}{'' if self._is_head else f' at worker {self._number}'}" if caught else ""

    def _report(self, table: StepSummary) -> None:
        """Make events of what everybody has told."""
        if self._is_head:
            self.now = self._elapsed_s()  # the sum is there
        now = self._common_s = table.now
        pull_s = min(hand.waited_s for hand in table.hands.values())
        arrivals = [self._arrival(worker, hand, now, pull_s) for worker, hand in table.hands.items() if hand.draw]
        newcomers = self._coordinator.joining  # for whom no update waits, once the others are in it
        arrivals.sort(key=lambda arrival: arrival.worker not in newcomers)
        self._events.extend(arrivals)
        while self._timers and self._timers[0] <= now:  # after the gradients: nobody is silent
            heappop(self._timers)
            self._events.append(Timer(now))
        leaving = [hand.leaves for hand in table.hands.values() if hand.leaves]
        if leaving:
            self._events.append(AbortRun(now, Outcome.INTERRUPTED, leaving[0]))
        self._is_to_reform = table.reforms

    def _arrival(self, worker: int, hand: StepReport, now: float, pull_s: float) -> Arrival:
        work = self._work.pop(worker)
        assert work.draw == hand.draw, "every rank decides alike"
        correction = self._allreduce.correction
        is_corrected = correction is not None and not isnan(hand.factor)
        return Arrival(
            now=now,
            worker=worker,
            draw=hand.draw,
            loss=hand.loss,
            samples=hand.samples,
            squared_norm=hand.squared_norm,
            finite=hand.finite,
            pull_s=pull_s,
            compute_s=hand.compute_s,
            variance=hand.variance,
            compensations=(Compensation(correction.formula, hand.factor),) if correction and is_corrected else (),
            sum_s=self._sum_s if self._is_head else 0.0,
            left_over_s=self._left_over_s if self._is_head else 0.0,
        )

    # --- sums ---------------------------------------------------------------------------------------------

    def _take_over(self, *, adopts: bool) -> None:
        """Move the average by the sum that lies where the payload was."""
        update, self._behind = self._behind, None
        assert update is not None
        self.is_settled = True
        self._part.check()
        shares = sum(each.samples for each in update.gradients) / self._replica.batch_size
        step = self._worker.apply_sum(self._worker.payload, shares, update, adopts=adopts)
        self._part.press(f"took over version {update.version}")
        if step is not None:
            self._applied = UpdateApplied(self._common_s, update.version, step)

    def _catch_up(self) -> None:
        """Let the average be that of now, though nobody goes on from it."""
        if self._behind is not None:
            self._circle.wait(self._circle.begin_sum(self._worker.payload), self._patience_s)
            self._take_over(adopts=False)

    def _evaluate(self) -> None:
        assert self._asked is not None
        self._catch_up()
        metrics = self._circle.metrics(self._measure)
        self._events.append(Evaluated(self._common_s, self._asked.version, metrics))
        self._asked = None
        self._free_s = time.monotonic()

    def _measure(self) -> dict[str, float]:
        begun_s = time.monotonic()
        metrics = self._replica.evaluate(self._worker.average)
        self._begun_s += time.monotonic() - begun_s  # the run's clock does not notice
        return metrics

    def _finish(self) -> None:
        """Let the average be that of the end, if everybody is still there."""
        try:
            self._catch_up()
        except MembershipChanged:
            self._behind = None  # and what the others have done since the last sum is lost

    # --- who takes part -----------------------------------------------------------------------------------

    def _begin(self, events: list[Event]) -> Event | None:
        """Form the first ring and go on from where rank 0 is."""

        def make_state(changes: list[Event]) -> dict[str, Any]:
            self._events.clear()
            return self._state([*events, *changes])

        return self._first(self._circle.form(make_state, self._cluster.start_timeout_s))

    def _form(self) -> Event | None:
        return self._first(self._circle.form(self._state, self._patience_s))

    def _first(self, state: Mapping[str, Any]) -> Event | None:
        self._events.extend(self._take_on(state))
        return self._events.popleft() if self._events else None

    def _state(self, events: list[Event]) -> dict[str, Any]:
        """Return where this process is, before these events."""
        coordinator = self._coordinator
        return {
            "coordinator": coordinator.state_dict() if coordinator.has_begun else None,
            "server": self._worker.server.state_dict(),
            "work": self._work,
            "timers": self._timers,
            "asked": self._asked,
            "now": self._common_s,
            "events": events,
        }

    def _take_on(self, state: Mapping[str, Any]) -> list[Event]:
        """Go on from where rank 0 is; return the events that come then."""
        if state["coordinator"] is not None:
            self._coordinator.load_state_dict(state["coordinator"])
        self._worker.restore_from(state["server"], keeps_state=self._has_taken_part)
        self._has_taken_part = True
        self._part.press(f"began at {state['now']:.3g} s")
        self._work = dict(state["work"])
        self._timers = list(state["timers"])
        self._asked = state["asked"]
        self._common_s = state["now"]
        self.now = max(self.now, self._common_s)
        events: list[Event] = state["events"]
        self._events.clear()
        self._behind = None
        self._part.forget()
        self.is_settled = True
        self._iteration = 0
        self._waited_s = 0.0
        self._free_s = time.monotonic()
        self._pace = OverheadEstimator(self._allreduce, self._elapsed_s())
        self._is_to_reform = False
        return events

    def _close(self, error: BaseException | None) -> None:
        torch.set_num_threads(self._threads)
        is_usage = isinstance(error, UsageError)
        if isinstance(self._circle, MembershipClient) and isinstance(error, Exception):
            self._circle.fail(error)
        self._circle.close({"error": describe_error(error), "is_usage": is_usage} if error else self.end)
        self._replica.close()

    def _tell_time(self) -> None:
        if self._is_head:
            self.now = max(self.now, self._elapsed_s())

    @property
    def _patience_s(self) -> float:
        """How long a silent worker is waited for."""
        patience_s = self._coordinator.worker_timeout_s
        return patience_s if patience_s < inf else self._cluster.start_timeout_s

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s
