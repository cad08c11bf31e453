"""Messages between the local engine and its processes, sent through pipes."""

from __future__ import annotations

from typing import NamedTuple

from paceline.core.events import Measured, Minibatch
from paceline.worker.task_progress import TaskProgress


class ComputeTask(NamedTuple):
    """Request to compute the gradient of a minibatch at a version."""

    draw: int
    version: int
    slot: int  # of the version in shared memory
    minibatch: Minibatch | None
    progress: TaskProgress
    run_s: float  # seconds since the start of the run
    sent_s: float  # monotonic clock, common to all processes of a machine


class WakeUp(NamedTuple):
    """Wake-up of a sleeping worker, which then checks whether its task is cancelled."""


class EvaluateTask(NamedTuple):
    """Request to evaluate a version."""

    version: int
    slot: int


class WorkerReady(NamedTuple):
    """Report of a process that it has built its model and accepts tasks."""


class TaskDone(NamedTuple):
    """Report that the gradient of a draw is in shared memory, and which parameters have none."""

    draw: int
    measured: Measured
    pull_s: float
    sent_s: float
    missing: tuple[int, ...]


class TaskCancelled(NamedTuple):
    """Report that a task was cancelled; the worker no longer reads its version."""

    draw: int


class EvaluationDone(NamedTuple):
    """Report of the metrics of a version."""

    version: int
    metrics: dict[str, float]


class TaskFailed(NamedTuple):
    """Report of an exception, after which the process exits.

    Attributes:
        message: one line with the place and the error.
        details: traceback.
        is_usage: whether it is a UsageError, which ends the run.
    """

    message: str
    details: str
    is_usage: bool


Reply = WorkerReady | TaskDone | TaskCancelled | EvaluationDone | TaskFailed
