"""Local step of an all-reduce iteration: the gradient of this rank, and its contribution to the sum."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from math import inf, isnan, nan
from typing import NamedTuple

from paceline.core.events import Apply, Arrival, Compensation, Compute, Measured
from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.transport.process_group import CompletionTimer
from paceline.engines.distributed.transport.step_options import StepOptions
from paceline.engines.distributed.transport.sum_messages import StepReport, StepSummary
from paceline.policies.compensation.base import correction_of
from paceline.protocols.allreduce import AllReduceConfig
from paceline.server.optimizer import set_learning_rates
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.utils.user_code import note_place
from paceline.worker.allreduce.base import AllReduceAlgorithm, Contribution
from paceline.worker.allreduce.vectors import drop_counts
from paceline.worker.gradient_source import Interrupted
from paceline.worker.minibatch_forecast import following
from paceline.worker.parameter_guard import ParameterGuard
from paceline.worker.replica import Replica
from paceline.worker.task_runner import TaskRunner


class OverheadEstimator:
    """Estimator of an iteration's overhead: the time that is neither computation nor sum.

    It follows the iterations as the simulation does. With b_i the start of worker i, c_i its seconds of computation, s
    the completion of the previous sum if it overlaps gradients (else -inf), and m the arrival of the last report,

        overhead = max(0, m - max_i(b_i + c_i, s))

    Args:
        allreduce: what is summed, and when.
        now: seconds since the run began.

    Example:
        >>> estimator = OverheadEstimator(AllReduceConfig(sums="gradients"), now=0.0)
        >>> estimator.on_reports({0: 1.0, 1: 2.0}, at_s=2.5)
        0.5
        >>> estimator.on_sum(sum_s=0.5)
        0.5
        >>> estimator.on_reports({0: 2.0, 1: 1.0}, at_s=5.0)
        0.0
    """

    def __init__(self, allreduce: AllReduceConfig, now: float) -> None:
        self._overlaps = allreduce.overlaps
        self._begun_s: dict[int, float] = {}
        self._free_s = now  # start of a worker that has not begun
        self._summed_s = -inf
        self._overhead_s = 0.0

    def on_reports(self, compute_s: Mapping[int, float], at_s: float) -> float:
        """Return the overhead in seconds when the last report has arrived.

        Args:
            compute_s: seconds of computation of each worker.
            at_s: arrival of the last report, in seconds since the run began.
        """
        begun_s = (self._begun_s.get(worker, self._free_s) + seconds for worker, seconds in compute_s.items())
        ready_s = {worker: max(each, self._summed_s) for worker, each in zip(compute_s, begun_s, strict=True)}
        last_s = max(ready_s.values(), default=at_s)
        overhead_s = max(0.0, at_s - last_s)
        self._begun_s = {worker: each + overhead_s for worker, each in ready_s.items()}
        self._free_s = last_s + overhead_s  # not earlier than the simulation, so that its delay is made up for
        self._overhead_s = overhead_s
        return overhead_s

    def on_sum(self, sum_s: float) -> float:
        """Record the seconds that the sum has taken since then; return them with the overhead that it cannot hide."""
        if self._overlaps:
            self._summed_s = self._free_s + sum_s
            return sum_s + self._overhead_s
        self._begun_s = {}
        self._free_s += sum_s
        return sum_s


class StepTimes:
    """Times of the iterations of one rank.

    Args:
        allreduce: what is summed, and when.
        now: seconds since the run began.

    Attributes:
        waited_s: seconds for which this rank waited for the newest sum; 0 in an iteration without one.
        sum_s: seconds from the last report to the end of the newest sum; 0 in an iteration without one.
        overhead_s: overhead of the newest iteration in seconds.
    """

    def __init__(self, allreduce: AllReduceConfig, now: float) -> None:
        self._estimator = OverheadEstimator(allreduce, now)
        self.waited_s = self.sum_s = self.overhead_s = 0.0
        self.on_free()

    @property
    def busy_s(self) -> float:
        """Seconds since this rank had to wait for no other one."""
        return time.monotonic() - self._free_s

    def on_free(self) -> None:
        """Record that this rank has to wait for no other one from now on."""
        self._free_s = time.monotonic()

    def on_step(self, summary: StepSummary, since_s: float) -> None:
        """Record an iteration, for which this rank waited from a moment on the monotonic clock until now."""
        self.on_free()
        self._since_s = since_s
        self.waited_s = 0.0
        self.sum_s = 0.0
        compute_s = {worker: report.measured.compute_s for worker, report in summary.reports.items() if report.draw}
        self.overhead_s = self._estimator.on_reports(compute_s, summary.now)

    def on_sum(self, completion: CompletionTimer, begun_s: float, reports_s: float) -> None:
        """Record the sum of the newest iteration.

        Args:
            completion: timer of the sum.
            begun_s: beginning of the run on the monotonic clock, in seconds.
            reports_s: arrival of the last report, in seconds since the run began.
        """
        self.waited_s = self._free_s - self._since_s
        summed_s = completion.completed_s(self._free_s) - begun_s
        self.sum_s = self._estimator.on_sum(max(0.0, summed_s - reports_s))


def arrivals_of(summary: StepSummary, allreduce: AllReduceConfig, joining: Collection[int]) -> list[Arrival]:
    """Return the arrivals of an iteration, without the times that they share.

    They are in the order of the workers, those of joining workers first: no update waits for them, once the others are
    in it.
    """
    workers = [worker for worker, report in summary.reports.items() if report.draw]
    ordered = sorted(workers, key=lambda worker: worker not in joining)
    return [_arrival_of(worker, summary.reports[worker], allreduce) for worker in ordered]


def _arrival_of(worker: int, report: StepReport, allreduce: AllReduceConfig) -> Arrival:
    correction = correction_of(allreduce)
    is_corrected = correction is not None and not isnan(report.factor)
    return Arrival(
        now=0.0,
        worker=worker,
        draw=report.draw,
        measured=report.measured,
        compensations=(Compensation(correction.formula, report.factor),) if correction and is_corrected else (),
        sum_s=0.0,
    )


class _Prefetched(NamedTuple):
    """Gradient that was computed ahead of its command, in so many seconds."""

    command: Compute
    measured: Measured
    took_s: float


class LocalStep:
    """Gradients of this rank, computed ahead where possible, and their contributions to the sum.

    In debug mode it detects changes of the parameters by other code.

    Args:
        rank: settings of this process.
        replica: replica that computes the gradients.
        algorithm: optimizer and parameters of this rank.
    """

    def __init__(self, rank: Rank, replica: Replica, algorithm: AllReduceAlgorithm) -> None:
        cluster, actions = rank.cluster, rank.host.lifecycle.fault_actions
        faults = tuple(cluster.faults)
        self._task_runner = TaskRunner(
            replica=replica,
            worker=cluster.worker,
            slowness=cluster.slowness,
            seed=rank.seed,
            faults=faults,
            sleep=time.sleep,
            fault_actions=actions,
        )
        self._replica = replica
        self._algorithm = algorithm
        self._prefetched: _Prefetched | None = None
        self._name = f"worker {cluster.worker}"
        self._guard = ParameterGuard.for_algorithm(algorithm) if cluster.debug else None
        self._last_change = ""
        self._missing = IndexBits(b"")  # parameters without a gradient in the newest step

    def snapshot(self, change: str) -> None:
        """Record that this rank itself has changed its parameters.

        Args:
            change: description of the change, in the past tense.
        """
        if self._guard is not None:
            self._guard.snapshot()
            self._last_change = change

    def check(self) -> None:
        """Detect, in debug mode, changes of the parameters by other code.

        Raises:
            UsageError: other code has changed them.
        """
        if self._guard is not None:
            self._guard.check(self._name, f"after it {self._last_change}")

    def on_reports(self, summary: StepSummary) -> None:
        """Take over what the step of all ranks has in common: learning rates, and the parameters without a gradient."""
        self._missing = summary.missing
        optimizer = self._algorithm.server.optimizer
        if rates := summary.learning_rates(len(optimizer.param_groups)):
            set_learning_rates(optimizer, rates)

    def before_sum(self, total: FlatBuffers) -> None:
        """Check the parameters, as `check`, and record which of them have a gradient in a sum."""
        self.check()
        total.receive(self._missing)

    def contribute(self, command: Compute | None, run_s: float, update: Apply) -> StepReport:
        """Compute the gradient and write the contribution; return the report, with the seconds computed ahead.

        Args:
            command: task of this rank; None if the other ranks have the last minibatches.
            run_s: seconds since the run began.
            update: expected update, if all ranks contribute.
        """
        if command is None:
            return self._skip()
        try:
            measured, ahead_s = self._gradient(command, run_s)
        except Interrupted:  # this process leaves the run
            return self._skip()
        self.check()
        contribution = Contribution(finite=False)
        if measured.finite:
            contribution = self._algorithm.contribute(
                measured.squared_norm, measured.samples / self._replica.batch_size, update
            )
            drop_counts(self._algorithm.payload, command.worker)  # whole numbers are those of worker 0, never sums
        else:
            self._algorithm.skip()
        self.snapshot(f"contributed its draw {command.draw}")
        return StepReport(
            draw=command.draw,
            measured=measured._replace(finite=contribution.finite, compute_s=ahead_s),
            factor=contribution.compensations[0].factor if contribution.compensations else nan,
            options=StepOptions(self._replica.learning_rates).encode(),
            missing=IndexBits.of(self._algorithm.gradient.missing).content,
        )

    def _skip(self) -> StepReport:
        self._algorithm.skip()
        return StepReport()

    def prefetch(self, command: Compute | None, run_s: float) -> None:
        """Compute the gradient of the task that this rank will probably have next, if there is one."""
        self.discard_prefetched()
        if command is None:
            return
        begun_s = time.monotonic()
        with suppress(Interrupted):  # this process leaves the run
            measured, _ = self._gradient(command, run_s)
            self._prefetched = _Prefetched(command, measured, time.monotonic() - begun_s)

    def discard_prefetched(self) -> None:
        """Discard the gradient that was computed ahead."""
        self._prefetched = None

    def _gradient(self, command: Compute, run_s: float) -> tuple[Measured, float]:
        """Return the scalars of a task's gradient, and the seconds for which it was computed ahead."""
        done, self._prefetched = self._prefetched, None
        if done is not None and (done.command.draw, done.command.minibatch) == (command.draw, command.minibatch):
            return done.measured, done.took_s
        ours = self._algorithm
        self._replica.prefetch(following(command.worker, command.draw, command.upcoming))
        try:
            measured = self._task_runner.gradient(command.draw, command.minibatch, run_s, ours.weights, ours.gradient)
        except Exception as error:
            note_place(error, f"after update {command.version}")
            raise
        return measured, 0.0
