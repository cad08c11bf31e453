"""What the engine and its processes say to each other over their pipes."""

from __future__ import annotations

from typing import NamedTuple

from paceline.core.events import Minibatch
from paceline.worker.replica import GradientStats


class ComputeTask(NamedTuple):
    """Compute the gradient of a minibatch at the version in a place."""

    draw: int
    version: int
    place: int
    minibatch: Minibatch | None
    run_s: float  # seconds since the run began
    sent_s: float  # monotonic clock, common to all processes of a machine


class WakeUp(NamedTuple):
    """Look at your flag: you may be asleep."""


class EvaluateTask(NamedTuple):
    """Measure the version in a place."""

    version: int
    place: int


class WorkerReady(NamedTuple):
    """The process has built its model and can be given work."""


class TaskDone(NamedTuple):
    """The gradient of a draw stands in shared memory."""

    draw: int
    measured: GradientStats
    pull_s: float
    sent_s: float


class TaskCancelled(NamedTuple):
    """The work was interrupted; its version is not read any more."""

    draw: int


class EvaluationDone(NamedTuple):
    """The metrics of a version."""

    version: int
    metrics: dict[str, float]


class TaskFailed(NamedTuple):
    """The process had an exception and ends.

    Attributes:
        message: one line.
        details: the traceback.
        is_usage: whether the whole run cannot work.
    """

    message: str
    details: str
    is_usage: bool


Reply = WorkerReady | TaskDone | TaskCancelled | EvaluationDone | TaskFailed
