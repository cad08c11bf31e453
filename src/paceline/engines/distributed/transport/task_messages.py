"""Messages about tasks, gradients and updates: small and frequent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from paceline.core.bounds import MOST_COMPENSATORS, Metrics, Seconds, Whole, check_norms
from paceline.core.events import Apply, Compute, Measured, Minibatch
from paceline.engines.distributed.transport.encoded import decoded, encoded
from paceline.utils.wording import printable
from paceline.worker.task_progress import TaskProgress

MOST_NUMBER_BYTES = 64  # of a minibatch, of one of its slices, or of an accepted gradient
MOST_UPDATE_BYTES = 1 << 13  # of an update without its gradients
MOST_SUMS = 16  # that servers of shards exchange at once


class MessageStruct(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages: an array on the wire, which begins with the name of the class."""


class Minibatches(NamedTuple):
    """Samples of a task, and of the next ones.

    Attributes:
        minibatch: samples of the task; None where the worker draws them itself.
        upcoming: forecast of the minibatches that follow.
    """

    minibatch: Minibatch | None
    upcoming: tuple[Minibatch, ...] = ()


class RemoteTask(MessageStruct, frozen=True, kw_only=True):
    """Task of a worker: the gradient of a minibatch at a version.

    Attributes:
        draw: number of the worker's task, counted from 1.
        version: version at which the gradient is computed.
        sends_version: whether the version comes with it; else the worker already has it.
        run_s: seconds since the run began.
        samples: its `Minibatches`, encoded.
        checksum: checksum of the version as sent, in debug mode.
        progress: progress of the run.
        is_difference: whether the version comes as a difference to the one before.
        early: number of the group that sums the gradient while it is computed; 0 for none.
        slot: number of the version in shared memory, where the gradient is to be, too; -1 if both are sent.
    """

    draw: int
    version: int
    sends_version: bool
    run_s: float
    samples: bytes = b""
    checksum: int | None = None
    progress: TaskProgress = TaskProgress()
    is_difference: bool = False
    early: int = 0
    slot: int = -1

    @classmethod
    def of(cls, command: Compute, **facts: Any) -> RemoteTask:
        """Return the message about a command.

        Args:
            command: task that the coordinator has assigned.
            facts: fields that the command does not have.
        """
        samples = encoded(Minibatches(command.minibatch, command.upcoming))
        return cls(draw=command.draw, version=command.version, samples=samples, **facts)

    def minibatches(self, workers: int, ahead: int) -> Minibatches:
        """Return the samples of the task.

        Args:
            workers: number of workers; a minibatch has at most one slice of each.
            ahead: number of minibatches that are forecast.

        Raises:
            ValueError: they are none, or too many.
        """
        most_bytes = MOST_NUMBER_BYTES * (1 + workers) * (1 + ahead)
        minibatches: Minibatches = decoded(self.samples, Minibatches, "minibatches", most_bytes)
        return minibatches


class CancelTask(MessageStruct, frozen=True):
    """Cancel the tasks of a worker up to this draw."""

    draw: int


class GradientUnneeded(MessageStruct, frozen=True):
    """The gradients of a worker's tasks up to this draw cannot be used any more; notices are sent in their place."""

    draw: int


class RemoteEvaluateTask(MessageStruct, frozen=True):
    """Evaluate the version that follows."""

    version: int


class GradientStarted(MessageStruct, frozen=True):
    """The first bucket of a gradient follows, while the other buckets are still being computed.

    Attributes:
        draw: number of the worker's task.
        busy_s: seconds from the arrival of the task to this message.
    """

    draw: Whole
    busy_s: Seconds


class RemoteTaskDone(MessageStruct, frozen=True, kw_only=True):
    """The gradient of a task is complete, and has been sent, unless this is a notice.

    Attributes:
        draw: number of the worker's task.
        busy_s: seconds from the arrival of the task to this message.
        measured: scalars of the gradient.
        options: options of the parameter groups for its step, as `StepOptions` encodes them.
        missing: indices of the model's parameters without a gradient, as the content of `IndexBits`.
        is_notice: whether the gradient is not sent, because it is unneeded.
        is_summed: whether its sum with those of the other ranks has begun.
    """

    draw: Whole
    busy_s: Seconds
    measured: Measured
    options: bytes = b""
    missing: bytes = b""
    is_notice: bool = False
    is_summed: bool = False

    def __post_init__(self) -> None:
        check_norms(self.measured.squared_norm, self.measured.variance)
        if not self.measured.samples and not self.measured.skipped:
            raise ValueError("a gradient of no samples, which its loop has not skipped")


class RemoteTaskCancelled(MessageStruct, frozen=True):
    """The task was cancelled; the worker no longer reads its version.

    Attributes:
        draw: number of the worker's task.
    """

    draw: int


class EvaluationResult(MessageStruct, frozen=True):
    """Metrics of a version, which stay encoded until it is known that their sender evaluates it."""

    version: Whole
    metrics: bytes

    @classmethod
    def of(cls, version: int, metrics: Mapping[str, float]) -> EvaluationResult:
        """Return the message with these metrics, by name."""
        return cls(version, encoded(metrics))

    def decoded(self, evaluating: Collection[int]) -> dict[str, float]:
        """Return the metrics by name.

        Args:
            evaluating: versions that the sender evaluates.

        Raises:
            ValueError: it does not evaluate this version, or sends no metrics.
        """
        if self.version not in evaluating:
            raise ValueError(f"it sent the result of version {self.version}, which it does not evaluate")
        return decoded_metrics(self.metrics, f"metrics of version {self.version}")


def decoded_metrics(content: bytes, what: str = "metrics") -> dict[str, float]:
    """Return metrics by name, as `decoded` does."""
    metrics = decoded(content, Metrics, what)
    return {printable(name): value for name, value in metrics.items()}


class AssignTask(MessageStruct, frozen=True, kw_only=True):
    """The shard server sends a worker its part of a task.

    Attributes:
        peer_id: id of the worker at rank 0.
        draw: number of the worker's task.
        version: version at which the gradient is computed.
        sends_version: whether the version follows the task.
        slot: as that of `RemoteTask`.
    """

    peer_id: int
    draw: int
    version: int
    sends_version: bool
    slot: int


class AssignEvaluation(MessageStruct, frozen=True):
    """The shard server sends its part of a version to the process that evaluates."""

    peer_id: int
    version: int


class AcceptGradient(MessageStruct, frozen=True, kw_only=True):
    """The shard server adds the gradient of a worker to the pending update.

    Attributes:
        worker: number of the worker.
        weight: what it counts in the mean.
        step_scale: additional weight.
        below: lowest number of a worker that may still have a gradient in the update; inf if none may.
    """

    worker: int
    weight: float
    step_scale: float
    below: float


class CompensateGradient(MessageStruct, frozen=True, kw_only=True):
    """The shard server compensates its part of a gradient for its staleness.

    Attributes:
        compensators: their text forms, in the order in which they act.
        worker: number of the worker whose gradient is compensated.
        version: version at which the gradient was computed.
        staleness: updates since that version.
        squared_norm: squared norm of the whole gradient.
    """

    compensators: Annotated[list[str], Meta(max_length=MOST_COMPENSATORS)]
    worker: int
    version: int
    staleness: int
    squared_norm: float


class ApplyUpdate(MessageStruct, frozen=True):
    """The shard server makes an update.

    Attributes:
        update: update to make, encoded.
        is_read: whether the previous version is still read, so that the next one needs other memory.
        options: options of the step, as `StepOptions` encodes them; empty where no loop sets them.
    """

    update: bytes
    is_read: bool
    options: bytes = b""

    def decoded(self, gradients: int) -> Apply:
        """Return the update.

        Args:
            gradients: number of gradients that were accepted for it.

        Raises:
            ValueError: it is none, or one of more gradients.
        """
        most_bytes = MOST_UPDATE_BYTES + MOST_NUMBER_BYTES * gradients
        update: Apply = decoded(self.update, Apply, "an update", most_bytes)
        return update


class UpdateDone(MessageStruct, frozen=True):
    """The shard server has made an update.

    Attributes:
        version: number of the new version.
        not_finite: why its parameters are not finite; empty if they are.
    """

    version: int
    not_finite: str = ""


class ReleaseVersion(MessageStruct, frozen=True):
    """No process reads this version any more."""

    version: int


class Heartbeat(MessageStruct, frozen=True):
    """Request for an answer, on a connection that is idle."""


class HeartbeatAnswer(MessageStruct, frozen=True):
    """Answer to a heartbeat."""


class GradientReceived(MessageStruct, frozen=True):
    """The shard server has received its part of a gradient.

    Attributes:
        peer_id: id of the worker at rank 0.
        draw: number of the worker's task.
    """

    peer_id: int
    draw: int


class PartialSums(MessageStruct, frozen=True):
    """One shard's part of sums over elements, or the sums over all shards."""

    values: Annotated[list[float], Meta(max_length=MOST_SUMS)]


TaskMessage = (
    RemoteTask
    | CancelTask
    | GradientUnneeded
    | RemoteEvaluateTask
    | GradientStarted
    | RemoteTaskDone
    | RemoteTaskCancelled
    | EvaluationResult
    | AssignTask
    | AssignEvaluation
    | AcceptGradient
    | CompensateGradient
    | ApplyUpdate
    | UpdateDone
    | ReleaseVersion
    | Heartbeat
    | HeartbeatAnswer
    | GradientReceived
    | PartialSums
)

# What a server takes from a worker.
TaskAnswer = GradientStarted | RemoteTaskDone | RemoteTaskCancelled | EvaluationResult | Heartbeat | HeartbeatAnswer
