"""All-reduce engine: every rank trains, and all run the same coordinator on the same events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Self

from msgspec.structs import replace

from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import (
    AbortRun,
    Accept,
    Apply,
    Compute,
    EndRun,
    Evaluate,
    Evaluated,
    Event,
    Interrupt,
    Outcome,
    RestartWorker,
    UpdateApplied,
)
from paceline.engines.base import Observer
from paceline.engines.distributed.allreduce.base import GroupMembership
from paceline.engines.distributed.allreduce.elastic_group import MembershipChanged
from paceline.engines.distributed.allreduce.local_step import LocalStep, StepTimes, arrival_of
from paceline.engines.distributed.allreduce.member import MembershipClient
from paceline.engines.distributed.allreduce.membership import MembershipServer
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.handshake import RunFinished
from paceline.engines.distributed.rendezvous.session import failed_end, successful_end
from paceline.engines.distributed.transport.messages import End
from paceline.engines.distributed.transport.process_group import CompletionTimer, PendingCollective
from paceline.engines.distributed.transport.sum_messages import StepSummary
from paceline.engines.wall_clock import WallClockEngine
from paceline.protocols.allreduce import AllReduceConfig
from paceline.server.flat_buffers import FlatBuffers
from paceline.worker.allreduce import AllReduceAlgorithm
from paceline.worker.replica import Replica, TaskProgress


@dataclass
class _Sum:
    """Sum that has begun after an iteration, when all reports were there, and the update that followed."""

    iteration: int
    total: FlatBuffers
    pending: list[PendingCollective]
    completion: CompletionTimer
    reports_s: float = 0.0
    update: Apply | None = None

    def is_awaited(self, begun: int | None) -> bool:
        """Return whether an iteration that awaits the sum of iteration `begun` awaits this one, too."""
        return begun is not None and self.iteration <= begun


class AllReduceEngine(WallClockEngine):
    """Engine of every rank under a protocol without a server.

    An iteration: compute the gradient; report it; start the sum; compute the next gradient meanwhile, if the protocol
    allows it; wait for the reports of all ranks; wait for the sum that the protocol awaits now. Then all gradients
    arrive, in the order of the workers, those of joining workers first.

    All events have the time at which rank 0 had all reports. The wait for the sum is the `pull_s` of the next
    gradients: the time for which all ranks have waited though every gradient was there. Rank 0 also measures the time
    of the sum itself (`CompletionTimer`) and the overhead of the iteration (`OverheadEstimator`).

    Args:
        rank: settings of this process.
        allreduce: what is summed, and when.
        replica: replica that computes this rank's gradients, and at rank 0 the evaluations.
        algorithm: optimizer and parameters of this rank.

    Attributes:
        end: end of the run, after `run`.
    """

    def __init__(self, rank: Rank, allreduce: AllReduceConfig, replica: Replica, algorithm: AllReduceAlgorithm) -> None:
        super().__init__()
        self._rank = rank
        self._cluster = cluster = rank.cluster
        self._process = rank.process
        job_spec = rank.make_job_spec(algorithm.server.model)
        self._allreduce = allreduce
        self._replica = replica
        self._algorithm = algorithm
        self._number = cluster.worker
        self._local_step = LocalStep(rank, replica, algorithm)
        self._is_rank_0 = cluster.is_server
        self._membership: GroupMembership = (
            MembershipServer(rank, job_spec, self._elapsed_s) if self._is_rank_0 else MembershipClient(rank, job_spec)
        )
        self._tasks: dict[int, Compute] = {}
        self._evaluation: Evaluate | None = None
        self._iteration = 0
        self._sums: deque[_Sum] = deque()  # that have begun, and are not applied
        self._not_summed: Apply | None = None  # newest update, if the average does not contain it
        self._unused: list[FlatBuffers] = []  # buffers for sums
        self._has_taken_part = False
        self._is_to_reform = False
        self._times = StepTimes(allreduce, now=0.0)
        self._common_s = 0.0  # time of the newest events
        self.end = End("", "")

    def __enter__(self) -> Self:
        """Wait until all ranks have joined; until then a signal acts as usual, because no run can be saved."""
        self._process.set_num_threads(self._cluster.worker_threads)
        try:
            self._membership.open()
        except BaseException as error:
            self._close(error)
            raise
        return super().__enter__()

    def _start(self) -> None:
        """Do nothing: all ranks have joined."""

    def run(self, coordinator: Coordinator, observe: Observer | None = None, first: Event | None = None) -> EndRun:
        """Run to the end and return the last command; ranks other than 0 wait until rank 0 has ended the run too."""
        self._coordinator = coordinator
        try:
            first = self._begin([first] if first is not None else [])
            while True:
                last = super().run(coordinator, observe, first)
                self._finish()
                if self._membership.is_over():
                    break
                first = self._first(self._membership.form(self._state, self._timeout_s))
        except RunFinished as finished:
            self.end = finished.end
            if not self._has_taken_part:
                raise
            return EndRun(Outcome(self.end.outcome), self.end.reason)
        self.end = successful_end(last, self.now, coordinator)
        return last

    # --- commands -----------------------------------------------------------------------------------------

    def compute(self, command: Compute) -> None:
        """Record the task of a worker."""
        self._replica.progress = TaskProgress(self._coordinator.version, self._coordinator.workload)
        self._tasks[command.worker] = command

    def interrupt(self, command: Interrupt) -> None:
        """Remove the task of a worker."""
        self._tasks.pop(command.worker, None)

    def restart_worker(self, command: RestartWorker) -> None:
        """Keep the worker: only its launcher can restart it."""

    def accept(self, command: Accept) -> None:
        """Do nothing: the gradient is part of the sum already."""

    def apply(self, command: Apply) -> None:
        """Apply the sum; in an iteration without one, record that."""
        self._not_summed = command
        self.is_settled = False
        self._algorithm.advance(command)
        if self._allreduce.begins_sum(self._iteration):
            self._sums[-1].update = command
            self._algorithm.begin_sum()
        while self._sums and self._sums[0].is_awaited(self._allreduce.awaited_sum(self._iteration)):
            self._end_sum()
        if self._is_rank_0:
            self.now = max(self.now, self._elapsed_s())

    def evaluate(self, command: Evaluate) -> None:
        """Evaluate before the next iteration."""
        self._evaluation = command

    # --- events -------------------------------------------------------------------------------------------

    def next_event(self) -> Event:
        """Run iterations until there is an event; all events up to that time come in the same order on all ranks."""
        event = super().next_event()
        self.now = max(self.now, event.now)
        return event

    def _advance(self) -> None:
        try:
            if self._evaluation is not None:
                self._evaluate(self._evaluation)
            elif self._is_to_reform:
                raise MembershipChanged
            else:
                self._iterate()
        except MembershipChanged:
            self._events.extend(self._restore_from(self._membership.form(self._state, self._timeout_s)))

    def _following(self) -> Event:
        """Return the next event; a signal reaches all ranks with the next iteration."""
        applied, self._applied = self._applied, None
        return applied if applied is not None else self.next_event()

    def _iterate(self) -> None:
        if self._leaves_alone and isinstance(self._membership, MembershipClient):
            self._membership.leave(self._caught)
            raise SystemExit(self._cluster.leaving_status)
        report = self._local_step.contribute(
            self._tasks.get(self._number), self.now, self._coordinator.expected_update()
        )
        compute_s = report.compute_s + self._times.busy_s
        begins = self._allreduce.begins_sum(self._iteration + 1)
        if begins:
            self._begin_sum()
        times = {"compute_s": compute_s, "waited_s": self._times.waited_s}
        generation = self._membership.generation
        self._membership.report(replace(report, generation=generation, interruption=self._interruption, **times))
        if self._allreduce.overlaps or not begins:
            next_task = self._coordinator.expected_work().get(self._number)
            if next_task is not None:
                self._local_step.prefetch(next_task, self.now)
        since_s = time.monotonic()
        summary = self._membership.summary(self._timeout_s)
        if begins:
            self._sums[-1].reports_s = summary.now
        awaited = [each for each in self._sums if each.is_awaited(self._allreduce.awaited_sum(self._iteration + 1))]
        for each in awaited:
            self._membership.wait(each.pending, self._timeout_s)
        self._times.on_step(summary, since_s)
        if awaited:
            self._times.on_sum(awaited[-1].completion, begun_s=self._begun_s, reports_s=awaited[-1].reports_s)
        self._iteration += 1
        self._add_events(summary)

    @property
    def _caught(self) -> str:
        """Signal that this process has caught, or another reason why it leaves; empty if it stays."""
        return self.signals.caught or self._process.interruption

    @property
    def _leaves_alone(self) -> bool:
        """Whether this process ends alone, as after the notice of a spot instance, and the others continue."""
        return self._cluster.elastic and not self._is_rank_0 and self._caught not in ("", "Ctrl-C")

    @property
    def _interruption(self) -> str:
        """Why this rank ends the run of all ranks; empty if it does not."""
        caught = "" if self._leaves_alone else self._caught
        return f"interrupted by {caught}{'' if self._is_rank_0 else f' at worker {self._number}'}" if caught else ""

    def _add_events(self, summary: StepSummary) -> None:
        """Turn the reports of all ranks into events."""
        if self._is_rank_0:
            self.now = self._elapsed_s()  # the sum is complete
        if summary.learning_rates and self._allreduce.sums == "gradients":  # the step is common to all ranks
            self._algorithm.server.set_learning_rates(summary.learning_rates)
        now = self._common_s = summary.now
        common: dict[str, Any] = {"now": now, "pull_s": min(report.waited_s for report in summary.reports.values())}
        if self._is_rank_0:
            common |= {"sum_s": self._times.sum_s, "left_over_s": self._times.overhead_s}
        arrivals = []
        for worker, report in summary.reports.items():
            if report.draw:
                assert self._tasks.pop(worker).draw == report.draw, "all ranks make the same decisions"
                arrivals.append(arrival_of(worker, report, self._allreduce)._replace(**common))
        joining = self._coordinator.joining  # no update waits for them, once the others are in it
        arrivals.sort(key=lambda arrival: arrival.worker not in joining)
        self._events.extend(arrivals)
        self._add_timers(now, now)  # after the gradients, so that no worker counts as silent
        interruptions = [report.interruption for report in summary.reports.values() if report.interruption]
        if interruptions:
            self._events.append(AbortRun(now, Outcome.INTERRUPTED, interruptions[0]))
        self._is_to_reform = summary.reforms

    def _begin_sum(self) -> None:
        """Begin the sum of the payloads after the next iteration."""
        payload = self._algorithm.payload
        if self._allreduce.separates_steps:  # the payload changes before the sum is complete
            total = self._unused.pop() if self._unused else self._replica.layout.allocate(self._algorithm.server.device)
            total.copy_(payload)
            payload = total
        pending = self._membership.begin_sum(payload)
        self._sums.append(_Sum(self._iteration + 1, payload, pending, CompletionTimer(pending)))

    def _end_sum(self) -> None:
        """Apply the oldest sum, which is complete; it is zero, and is not applied, if no update has followed it."""
        done = self._sums.popleft()
        if done.update is not None:
            self._apply_sum(done.total, done.update, adopts=True)
        if self._allreduce.separates_steps:
            self._unused.append(done.total)

    def _apply_sum(self, total: FlatBuffers, update: Apply, *, adopts: bool) -> None:
        """Move the average by the sum of an update."""
        if not self._allreduce.separates_steps:
            self._not_summed = None
        self.is_settled = True
        self._local_step.check()
        shares = sum(each.samples for each in update.gradients) / self._replica.batch_size
        step = self._algorithm.apply_sum(total, shares, update, adopts=adopts)
        self._local_step.snapshot(f"applied version {update.version}")
        if step is not None:
            self._applied = UpdateApplied(self._common_s, update.version, step)

    def _update_average(self) -> None:
        """Move the average to the mean of the workers' parameters, which does not change the workers' own ones."""
        if self._not_summed is not None:
            for each in self._sums:
                self._membership.wait(each.pending, self._timeout_s)
            self._algorithm.collect_steps()
            self._membership.wait(self._membership.begin_sum(self._algorithm.payload), self._timeout_s)
            self._apply_sum(self._algorithm.payload, self._not_summed, adopts=False)

    def _evaluate(self, command: Evaluate) -> None:
        average = self._algorithm.average.memory
        kept = average.clone() if self._allreduce.separates_steps else None
        self._update_average()
        metrics = self._membership.metrics(self._measure)
        if kept is not None:
            average.copy_(kept)
            self._local_step.snapshot(f"evaluated version {command.version}")
        self._events.append(Evaluated(self._common_s, command.version, metrics))
        self._evaluation = None
        self._times.on_free()

    def _measure(self) -> dict[str, float]:
        begun_s = time.monotonic()
        metrics = self._replica.evaluate(self._algorithm.average)
        self._begun_s += time.monotonic() - begun_s  # the run's clock stands still
        return metrics

    def _finish(self) -> None:
        """Bring the average up to date at the end, if all ranks are still there."""
        try:
            self._update_average()
        except MembershipChanged:
            self._not_summed = None  # what the other ranks have done since the last sum is lost

    # --- membership ---------------------------------------------------------------------------------------

    def _begin(self, events: list[Event]) -> Event | None:
        """Form the first group and start from the state of rank 0."""
        self._common_s = self.now

        def make_state(changes: list[Event]) -> dict[str, Any]:
            self._events.clear()
            return self._state([*events, *changes])

        return self._first(self._membership.form(make_state, self._cluster.start_timeout_s))

    def _first(self, state: Mapping[str, Any]) -> Event | None:
        self._events.extend(self._restore_from(state))
        return self._events.popleft() if self._events else None

    def _state(self, events: list[Event]) -> dict[str, Any]:
        """Return the state of this process before these events."""
        coordinator = self._coordinator
        return {
            "coordinator": coordinator.state_dict() if coordinator.has_begun else None,
            "server": self._algorithm.server.state_dict(),
            "work": self._tasks,
            "timers": self._timers,
            "asked": self._evaluation,
            "now": self._common_s,
            "events": events,
        }

    def _restore_from(self, state: Mapping[str, Any]) -> list[Event]:
        """Continue from the state of rank 0; return the events that follow."""
        if state["coordinator"] is not None:
            self._coordinator.load_state_dict(state["coordinator"])
        self._algorithm.restore_from(state["server"], keeps_state=self._has_taken_part)
        self._has_taken_part = True
        self._local_step.snapshot(f"began at {state['now']:.3g} s")
        self._tasks = dict(state["work"])
        self._timers = list(state["timers"])
        self._evaluation = state["asked"]
        self._common_s = state["now"]
        self.now = max(self.now, self._common_s)
        events: list[Event] = state["events"]
        self._events.clear()
        self._sums.clear()
        self._not_summed = None
        self._local_step.discard_prefetched()
        self.is_settled = True
        self._iteration = 0
        self._times = StepTimes(self._allreduce, self._elapsed_s())
        self._is_to_reform = False
        return events

    def _close(self, error: BaseException | None) -> None:
        self._process.set_num_threads(self._threads)
        self._membership.close(failed_end(error) if error else self.end, error)
        self._rank.close()
        self._replica.close()

    @property
    def _timeout_s(self) -> float:
        """Longest silence of a worker, in seconds."""
        timeout_s = self._coordinator.worker_timeout_s
        return timeout_s if timeout_s < inf else self._cluster.start_timeout_s
