"""A rank's own part in an iteration without a server: its gradient, and what it hands in of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import inf, nan
from typing import NamedTuple

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import Apply, Compute
from paceline.engines.distributed.allreduce.messages import StepReport
from paceline.protocols.allreduce import AllReduceConfig
from paceline.utils.user_code import note_place
from paceline.worker.allreduce import AllReduceAlgorithm, Contribution
from paceline.worker.parameter_guard import ParameterGuard
from paceline.worker.replica import GradientStats, Replica
from paceline.worker.task_runner import TaskRunner


class OverheadEstimator:
    """Goes through the iterations as the simulation does, and sees what is left over.

    With b_i when worker i began, c_i the seconds that it computed, s when the sum before was there, where it overlaps
    gradients (else -inf), and m when the last worker had handed in,

        left over = max(0, m - max(b_i + c_i, s))

    Args:
        allreduce: what is summed, and when.
        now: seconds since the run began.

    Example:
        >>> pace = OverheadEstimator(AllReduceConfig("gradients"), now=0.0)
        >>> pace.handed_in({0: 1.0, 1: 2.0}, at_s=2.5)
        0.5
        >>> pace.summed(sum_s=0.5)
        0.5
        >>> pace.handed_in({0: 2.0, 1: 1.0}, at_s=5.0)
        0.0
    """

    def __init__(self, allreduce: AllReduceConfig, now: float) -> None:
        self._overlaps = allreduce.overlaps
        self._begun_s: dict[int, float] = {}
        self._free_s = now  # whoever has not begun
        self._summed_s = -inf
        self._left_s = 0.0

    def handed_in(self, compute_s: Mapping[int, float], at_s: float) -> float:
        """Return the seconds that are left over when the last worker has handed in."""
        begun_s = (self._begun_s.get(worker, self._free_s) + seconds for worker, seconds in compute_s.items())
        ready_s = {worker: max(each, self._summed_s) for worker, each in zip(compute_s, begun_s, strict=True)}
        last_s = max(ready_s.values(), default=at_s)
        left_s = max(0.0, at_s - last_s)
        self._begun_s = {worker: each + left_s for worker, each in ready_s.items()}
        self._free_s = last_s + left_s  # not before the simulation is there, so that what it is late by is made up for
        self._left_s = left_s
        return left_s

    def summed(self, sum_s: float) -> float:
        """Take note of how long the sum has taken from then on; return it with what is left over and cannot hide."""
        if self._overlaps:
            self._summed_s = self._free_s + sum_s
            return sum_s + self._left_s
        self._begun_s, self._free_s = {}, self._free_s + sum_s
        return sum_s


class _Done(NamedTuple):
    """A gradient that was computed, in so many seconds."""

    work: Compute
    measured: GradientStats
    took_s: float


class LocalStep:
    """Computes this rank's gradients, where possible before they are asked for, and makes its payloads.

    In debug mode nobody else may change what this rank has learned.

    Args:
        cluster: of which this process is a rank.
        seed: of the run.
        replica: computes.
        worker: steps.
    """

    def __init__(self, cluster: Torchrun, seed: int, replica: Replica, worker: AllReduceAlgorithm) -> None:
        faults = tuple(cluster.faults)
        self._task_runner = TaskRunner(replica, cluster.worker, cluster.slowness, seed, faults, time.sleep)
        self._batch_size = replica.batch_size
        self._worker = worker
        self._done: _Done | None = None
        self._name = f"worker {cluster.worker}"
        self._guard = ParameterGuard.for_algorithm(worker) if cluster.debug else None
        self._has_last = ""  # done to what it has learned

    def press(self, what: str) -> None:
        """Take note that this rank itself has changed what it has learned.

        Args:
            what: it has done.
        """
        if self._guard is not None:
            self._guard.snapshot()
            self._has_last = what

    def check(self) -> None:
        """Refuse, in debug mode, what somebody else has changed.

        Raises:
            UsageError: somebody has.
        """
        if self._guard is not None:
            self._guard.check(self._name, f"after it {self._has_last}")

    def hand_in(self, work: Compute | None, run_s: float, update: Apply) -> StepReport:
        """Make the payload; return what is told of it, and as `compute_s` what was computed of it ahead.

        Args:
            work: that this rank was given; None if others have the last minibatches.
            run_s: seconds since the run began.
            update: what the coming update will say, if everybody takes part.
        """
        if work is None:
            self._worker.skip()
            return StepReport()
        measured, ahead_s = self._measured(work, run_s)
        self.check()
        contribution = Contribution(finite=False)
        if measured.finite:
            contribution = self._worker.contribute(measured.squared_norm, measured.samples / self._batch_size, update)
        else:
            self._worker.skip()
        self.press(f"handed in its draw {work.draw}")
        return StepReport(
            draw=work.draw,
            loss=measured.loss,
            samples=measured.samples,
            squared_norm=measured.squared_norm,
            variance=measured.variance,
            finite=contribution.finite,
            factor=contribution.compensations[0].factor if contribution.compensations else nan,
            compute_s=ahead_s,
        )

    def compute_ahead(self, work: Compute, run_s: float) -> None:
        """Compute what will be this rank's next work, if everything goes on as it has."""
        self.forget()
        begun_s = time.monotonic()
        measured, _ = self._measured(work, run_s)
        self._done = _Done(work, measured, time.monotonic() - begun_s)

    def forget(self) -> None:
        """Let what was computed ahead be of no use."""
        self._done = None

    def _measured(self, work: Compute, run_s: float) -> tuple[GradientStats, float]:
        """Return what is known of the gradient of this work, and in how many seconds it was computed ahead, if so."""
        done, self._done = self._done, None
        if done is not None and (done.work.draw, done.work.minibatch) == (work.draw, work.minibatch):
            return done.measured, done.took_s
        ours = self._worker
        try:
            return self._task_runner.gradient(work.draw, work.minibatch, run_s, ours.weights, ours.gradient), 0.0
        except Exception as error:
            note_place(error, f"after update {work.version}")
            raise
