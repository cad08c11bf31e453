"""Run of one rank without a server: every rank trains, and all run the same coordinator on the same events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import Any, Self

import torch
from msgspec.structs import replace

from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import (
    AbortRun,
    Apply,
    EndRun,
    Evaluate,
    Evaluated,
    Event,
    Outcome,
    UpdateApplied,
)
from paceline.core.wire import parse_wire
from paceline.engines.distributed.allreduce.base import GroupMembership
from paceline.engines.distributed.allreduce.elastic_group import MembershipChanged
from paceline.engines.distributed.allreduce.group_clock import GroupClock
from paceline.engines.distributed.allreduce.interruption import Interruption
from paceline.engines.distributed.allreduce.local_step import LocalStep, StepTimes, arrivals_of
from paceline.engines.distributed.allreduce.member import MembershipClient
from paceline.engines.distributed.allreduce.membership import MembershipServer
from paceline.engines.distributed.allreduce.rank_checkpoints import RankCheckpoints
from paceline.engines.distributed.allreduce.rank_ports import RankTasks, SummedParameters
from paceline.engines.distributed.allreduce.step_reports import StepReports
from paceline.engines.distributed.allreduce.sum_queue import SumQueue
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.handshake import RunFinished
from paceline.engines.distributed.rendezvous.session import failed_end, successful_end
from paceline.engines.distributed.transport.messages import End
from paceline.engines.distributed.transport.sum_messages import StepSummary
from paceline.engines.loop import Observer, RunLoop
from paceline.protocols.allreduce import AllReduceConfig
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.worker.allreduce.base import AllReduceAlgorithm
from paceline.worker.replica import Replica


# Long: the steps of an iteration, and the ways in which it ends, share the state of this rank.
class RankRun:
    """Run of a rank under a protocol without a server.

    An iteration: compute the gradient; report it; start the sum; compute the next gradient meanwhile, if the protocol
    allows it; wait for the reports of all ranks; wait for the sum that the protocol awaits now. Then all gradients
    arrive, in the order of the workers, those of joining workers first.

    All events have the time at which rank 0 had all reports. The wait for the sum is the `pull_s` of the next
    gradients: the time for which all ranks have waited though every gradient was there.

    Args:
        rank: settings of this process.
        allreduce: what is summed, and when.
        replica: replica that computes this rank's gradients, and at rank 0 the evaluations.
        algorithm: optimizer and parameters of this rank.

    Attributes:
        end: end of the run, after `run`.
        is_settled: whether the average contains all updates, so that the run can be saved.
        signals: signals that this process gets.
        network: counts of the connections of this process.
    """

    def __init__(self, rank: Rank, allreduce: AllReduceConfig, replica: Replica, algorithm: AllReduceAlgorithm) -> None:
        self._rank = rank
        self._lifecycle = rank.host.lifecycle
        self._cluster = cluster = rank.cluster
        self.signals = rank.host.lifecycle.signals(cluster.notice)
        self.network = rank.transport.counters
        job_spec = rank.make_job_spec(algorithm.server.model)
        self._allreduce = allreduce
        self._replica = replica
        self._algorithm = algorithm
        self._number = cluster.worker
        self._local_step = LocalStep(rank, replica, algorithm)
        self._interruption = Interruption(rank, self.signals)
        self._clock = GroupClock(self._advance)
        self._workers = RankTasks(replica)
        # A signal reaches all ranks with the next iteration, so it does not end the loop of one.
        self._loop = RunLoop(self._workers, SummedParameters(self._apply), self._clock)
        self._threads = torch.get_num_threads()
        self.is_settled = True
        reports = StepReports(self._clock.elapsed_s, len(algorithm.server.optimizer.param_groups))
        self._membership: GroupMembership = (
            MembershipServer(rank, job_spec, reports) if cluster.is_server else MembershipClient(rank, job_spec)
        )
        self._iteration = 0
        self._sums = SumQueue(allreduce, algorithm, replica.layout, parse_wire(cluster.wire))
        self._not_summed: Apply | None = None  # newest update, if the average does not contain it
        self._checkpoints = RankCheckpoints(rank, algorithm, self._sums)
        self._has_taken_part = False
        self._is_to_reform = False
        self._times = StepTimes(allreduce, now=0.0)
        self.end = End("", "")

    def __enter__(self) -> Self:
        """Wait until all ranks have joined; until then a signal acts as usual, because no run can be saved."""
        self._lifecycle.set_num_threads(self._cluster.worker_threads)
        try:
            self._membership.open()
        except BaseException as error:
            self._close(error)
            raise
        self.signals.install()
        self._clock.begin(self.signals)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Leave the group and release all resources."""
        torch.set_num_threads(self._threads)
        self._close(error)
        self.signals.remove()

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self._clock.now

    def resume_at(self, version: int, now: float) -> None:
        """Start the clock at this time."""
        self._clock.now = now

    def run(self, coordinator: Coordinator, observe: Observer | None = None, first: Event | None = None) -> EndRun:
        """Run to the end and return the last command; ranks other than 0 wait until rank 0 has ended the run too."""
        self._coordinator = coordinator
        try:
            first = self._begin([first] if first is not None else [])
            while True:
                last = self._loop.run(coordinator, observe, first)
                self._finish()
                if self._membership.is_over():
                    self._checkpoints.at_end(coordinator.version)
                    break
                first = self._first(self._membership.form(self._state, self._timeout_s))
        except RunFinished as finished:
            self.end = finished.end
            if not self._has_taken_part:
                raise
            if not self.end.has_failed:
                self._checkpoints.at_end(coordinator.version)
            return EndRun(Outcome(self.end.outcome), self.end.reason)
        self.end = successful_end(last, self.now, coordinator)
        return last

    def prepare_checkpoint(self) -> bool:
        """Let all ranks save the state that only they have, after the next settled update."""
        return self._checkpoints.prepare(self._coordinator.version)

    def _apply(self, command: Apply) -> None:
        """Apply the sum; in an iteration without one, record that."""
        self._not_summed = command
        self.is_settled = False
        self._algorithm.advance(command)
        self._sums.on_update(self._iteration, command)
        for done, update in self._sums.end(self._iteration):
            self._apply_sum(done.total, update, done.fragment)
        if self.is_settled:
            self._checkpoints.after_update(command.version)
        if self._cluster.is_server:
            self._clock.now = max(self._clock.now, self._clock.elapsed_s())

    def _advance(self) -> None:
        try:
            if self._workers.evaluation is not None:
                self._evaluate(self._workers.evaluation)
            elif self._is_to_reform:
                raise MembershipChanged
            else:
                self._iterate()
        except MembershipChanged:
            self._clock.extend(self._restore_from(self._membership.form(self._state, self._timeout_s)))

    def _iterate(self) -> None:
        if self._interruption.leaves_alone and isinstance(self._membership, MembershipClient):
            self._membership.leave(self._interruption.reason)
            raise SystemExit(self._cluster.leaving_status)
        task = self._workers.tasks.get(self._number)
        report = self._local_step.contribute(task, self.now, self._coordinator.expected_update())
        compute_s = report.measured.compute_s + self._times.busy_s
        measured = report.measured._replace(compute_s=compute_s)
        iteration = self._iteration + 1
        self._sums.begin(iteration, self._membership)
        about = {"generation": self._membership.generation, **self._interruption.in_report}
        self._membership.report(
            replace(
                report, measured=measured, waited_s=self._times.waited_s, saves=self._checkpoints.is_asked, **about
            ),
            self._workers.tasks,
        )
        if self._allreduce.overlaps or not self._allreduce.begins_sum(iteration):
            self._local_step.prefetch(self._coordinator.expected_work().get(self._number), self.now)
        since_s = time.monotonic()
        summary = self._membership.summary(self._timeout_s)
        self._sums.on_reports(iteration, summary.now)
        self._checkpoints.on_reports(summary.reports)
        awaited = self._sums.awaited(iteration)
        self._membership.wait([each for done in awaited for each in done.pending], self._timeout_s)
        self._sums.on_wait(iteration)
        self._times.on_step(summary, since_s)
        if awaited:
            self._times.on_sum(awaited[-1].completion, begun_s=self._clock.begun_s, reports_s=awaited[-1].reports_s)
        self._iteration = iteration
        self._add_events(summary)

    def _add_events(self, summary: StepSummary) -> None:
        """Turn the reports of all ranks into events."""
        if self._cluster.is_server:
            self._clock.now = self._clock.elapsed_s()  # the sum is complete
        if self._allreduce.sums == "gradients":  # the step is common to all ranks
            self._local_step.on_reports(summary)
        now = self._clock.common_s = summary.now
        common: dict[str, Any] = {"now": now, "pull_s": min(report.waited_s for report in summary.reports.values())}
        if self._cluster.is_server:
            common |= {"sum_s": self._times.sum_s, "left_over_s": self._times.overhead_s}
        arrivals = arrivals_of(summary, self._allreduce, self._coordinator.joining)
        for arrival in arrivals:
            assert self._workers.tasks.pop(arrival.worker).draw == arrival.draw, "all ranks make the same decisions"
        self._clock.extend(arrival._replace(**common) for arrival in arrivals)
        self._clock.ring(now)  # after the gradients, so that no worker counts as silent
        ending = [report for report in summary.reports.values() if report.interruption]
        if ending:
            self._clock.add(AbortRun(now, Outcome(ending[0].outcome), ending[0].interruption))
        self._is_to_reform = summary.reforms

    def _apply_sum(self, total: FlatBuffers, update: Apply, fragment: int | None) -> None:
        """Move the average by the sum of an update."""
        if not self._allreduce.leaves_steps_out:
            self._not_summed = None
        self.is_settled = True
        self._local_step.before_sum(total)
        shares = sum(each.samples for each in update.gradients) / self._replica.batch_size
        step = self._algorithm.apply_sum(total, shares, update, fragment)
        self._local_step.snapshot(f"applied version {update.version}")
        if step is not None:
            self._clock.applied = UpdateApplied(self._clock.common_s, update.version, step)

    def _update_average(self) -> None:
        """Move the average to the mean of the workers' parameters, which does not change the workers' own ones."""
        if self._not_summed is not None:
            self._membership.wait([each for begun in self._sums for each in begun.pending], self._timeout_s)
            self._algorithm.collect_steps(self._number)
            self._membership.wait(self._membership.begin_sum(self._algorithm.payload), self._timeout_s)
            self._apply_sum(self._algorithm.payload, self._not_summed, fragment=None)

    def _evaluate(self, command: Evaluate) -> None:
        with self._algorithm.keeping_average():
            self._update_average()
            metrics = self._membership.metrics(self._measure)
        self._local_step.snapshot(f"evaluated version {command.version}")
        self._clock.add(Evaluated(self._clock.common_s, command.version, metrics))
        self._workers.evaluation = None
        self._times.on_free()

    def _measure(self) -> dict[str, float]:
        begun_s = time.monotonic()
        metrics = self._replica.evaluate(self._algorithm.average)
        self._clock.begun_s += time.monotonic() - begun_s  # the run's clock stands still
        return metrics

    def _finish(self) -> None:
        """Bring the average up to date at the end, if all ranks are still there."""
        with suppress(MembershipChanged):  # then the steps of the other ranks since the last sum are lost
            self._update_average()
        self._not_summed = None

    # --- membership ---------------------------------------------------------------------------------------

    def _begin(self, events: list[Event]) -> Event | None:
        """Form the first group and start from the state of rank 0."""
        self._clock.common_s = self.now

        def make_state(changes: list[Event]) -> dict[str, Any]:
            self._clock.clear()
            return self._state([*events, *changes])

        return self._first(self._membership.form(make_state, self._cluster.start_timeout_s))

    def _first(self, state: Mapping[str, Any]) -> Event | None:
        self._clock.extend(self._restore_from(state))
        return self._clock.take() if self._coordinator.has_begun else None

    def _state(self, events: list[Event]) -> dict[str, Any]:
        """Return the state of this process before these events."""
        coordinator = self._coordinator
        return {
            "coordinator": coordinator.state_dict() if coordinator.has_begun else None,
            "server": self._algorithm.server.state_dict(),
            "work": self._workers.tasks,
            "timers": self._clock.timers,
            "asked": self._workers.evaluation,
            "now": self._clock.common_s,
            "events": events,
        }

    def _restore_from(self, state: Mapping[str, Any]) -> list[Event]:
        """Continue from the state of rank 0; return the events that follow."""
        if state["coordinator"] is not None:
            self._coordinator.load_state_dict(state["coordinator"])
        # A rank that has trained keeps its own momentum, which rank 0 does not have.
        own = (
            self._algorithm.own_state()
            if self._has_taken_part
            else self._checkpoints.restore(self._coordinator.version)
        )
        self._algorithm.restore_from(state["server"], own)
        self._has_taken_part = True
        self._local_step.snapshot(f"began at {state['now']:.3g} s")
        self._workers.tasks = dict(state["work"])
        self._clock.timers = list(state["timers"])
        self._workers.evaluation = state["asked"]
        self._clock.common_s = state["now"]
        self._clock.now = max(self._clock.now, self._clock.common_s)
        events: list[Event] = state["events"]
        self._clock.clear()
        self._sums.leave_group()
        self._not_summed = None
        self._local_step.discard_prefetched()
        self.is_settled = True
        self._iteration = 0
        self._times = StepTimes(self._allreduce, self._clock.elapsed_s())
        self._is_to_reform = False
        return events

    def _close(self, error: BaseException | None) -> None:
        self._lifecycle.set_num_threads(self._threads)
        self._membership.close(failed_end(error) if error else self.end, error)
        self._rank.close()
        self._replica.close()

    @property
    def _timeout_s(self) -> float:
        """Longest silence of a worker, in seconds."""
        timeout_s = self._coordinator.timeout_s
        return timeout_s if timeout_s < inf else self._cluster.start_timeout_s
