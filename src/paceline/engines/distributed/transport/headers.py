"""Messages of the data plane: numbers in a header of fixed size, which tensors may follow; nothing is pickled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan, nan
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from paceline.core.events import Accept, Apply, Minibatch
from paceline.worker.replica import GradientStats

NUMBERS = 16  # in a header


class RemoteTask(NamedTuple):
    """Task of a worker: the gradient of a minibatch at a version.

    Attributes:
        draw: number of the worker's task, counted from 1.
        version: version at which the gradient is computed.
        sends_version: whether the version follows; else the worker already has it.
        run_s: seconds since the run began.
        shard: shard of the data; None where the worker draws its samples itself, and so the next two.
        epoch: epoch of the minibatch.
        number: number of the minibatch in its epoch.
        checksum: checksum of the version as sent, in debug mode.
    """

    draw: int
    version: int
    sends_version: bool
    run_s: float
    shard: int | None
    epoch: int | None
    number: int | None
    checksum: int | None = None

    @property
    def minibatch(self) -> Minibatch | None:
        """Samples of the task."""
        return None if self.shard is None else Minibatch(self.shard, self.epoch, self.number)


class CancelTask(NamedTuple):
    """Cancel the tasks of a worker up to this draw."""

    draw: int


class RemoteEvaluateTask(NamedTuple):
    """Evaluate the version that follows."""

    version: int


class GradientStarted(NamedTuple):
    """The first bucket of a gradient follows, while the other buckets are still being computed.

    Attributes:
        draw: number of the worker's task.
        busy_s: seconds from the arrival of the task to this message.
    """

    draw: int
    busy_s: float


class RemoteTaskDone(NamedTuple):
    """The gradient of a task is complete; the buckets that were not sent earlier follow.

    Attributes:
        draw: number of the worker's task.
        resent: set of the buckets that come a second time, one bit for each.
        busy_s: seconds from the arrival of the task to this message.
        loss: loss of the minibatch; this and the next fields as in `GradientStats`.
        samples: samples of the minibatch.
        squared_norm: squared norm of the gradient.
        variance: variance of the gradient.
        finite: whether the gradient is finite.
        compute_s: seconds to compute the gradient.
    """

    draw: int
    resent: int
    busy_s: float
    loss: float
    samples: int
    squared_norm: float
    variance: float
    finite: bool
    compute_s: float

    @property
    def measured(self) -> GradientStats:
        """Scalars of the gradient."""
        return GradientStats(*self[3:])


class RemoteTaskCancelled(NamedTuple):
    """The task was cancelled; the worker no longer reads its version.

    Attributes:
        draw: number of the worker's task.
        sent: set of the buckets of its gradient that had been sent, one bit for each.
    """

    draw: int
    sent: int


class AssignTask(NamedTuple):
    """The shard server sends a worker its part of a task.

    Attributes:
        peer_id: id of the worker at rank 0.
        draw: number of the worker's task.
        version: version at which the gradient is computed.
        sends_version: whether the version follows the task.
    """

    peer_id: int
    draw: int
    version: int
    sends_version: bool


class AssignEvaluation(NamedTuple):
    """The shard server sends its part of a version to the process that evaluates."""

    peer_id: int
    version: int


class AcceptGradient(NamedTuple):
    """The shard server adds the gradient of a worker to the pending update."""

    worker: int
    samples: int
    step_scale: float


class ApplyUpdate(NamedTuple):
    """The shard server makes an update, as `Apply` describes it.

    Attributes:
        version: version that the update makes.
        gradients: number of gradients in the update.
        lr_scale: as in `Apply`, like the next fields.
        measure: whether the step is measured.
        step_scale: factor of the step.
        momentum_limit: limit of the momentum.
        weight_decay_scale: factor of the weight decay.
        rebinds: whether the previous version is still read, so that the next one needs other memory.

    >>> ApplyUpdate.of(Apply(7, (), 0.5, "enough"), rebinds=True).update == Apply(7, (), 0.5, "")
    True
    """

    version: int
    gradients: int
    lr_scale: float
    measure: bool
    step_scale: float
    momentum_limit: float
    weight_decay_scale: float
    rebinds: bool

    @classmethod
    def of(cls, update: Apply, rebinds: bool) -> ApplyUpdate:
        """Return the message for an update."""
        numbers = {name: getattr(update, name) for name in _SENT}
        return cls(**numbers, gradients=len(update.gradients), rebinds=rebinds)

    @property
    def update(self) -> Apply:
        """The update; of its gradients, only their number is sent."""
        numbers: dict[str, Any] = {name: getattr(self, name) for name in _SENT}
        return Apply(**numbers, gradients=(Accept(0, 0, 0, 1),) * self.gradients, reason="")


_SENT = [name for name in Apply._fields if name not in {"gradients", "reason"}]


class UpdateDone(NamedTuple):
    """The shard server has made an update."""

    version: int


class ReleaseVersion(NamedTuple):
    """No process reads this version any more."""

    version: int


class Heartbeat(NamedTuple):
    """Liveness request, and the answer to it."""


class GradientReceived(NamedTuple):
    """The shard server has received its part of a gradient.

    Attributes:
        peer_id: id of the worker at rank 0.
        draw: number of the worker's task.
    """

    peer_id: int
    draw: int


class PartialSums(NamedTuple):
    """One shard's part of up to three sums over elements, or the sums over all shards.

    Attributes:
        size: number of sums, 0 to 3.
        first: first sum.
        second: second sum.
        third: third sum.
    """

    size: int
    first: float
    second: float
    third: float

    @property
    def values(self) -> list[float]:
        """The sums."""
        return list(self[1 : 1 + self.size])


def partial_sums(values: Sequence[float]) -> PartialSums:
    """Return up to three sums as a message.

    >>> partial_sums([1.5, 2.0]).values
    [1.5, 2.0]
    """
    return PartialSums(len(values), *values, *[0.0] * (3 - len(values)))


class ControlHeader(NamedTuple):
    """A control message of this many bytes follows."""

    nbytes: int


ShardCommand = AssignTask | AssignEvaluation | AcceptGradient | ApplyUpdate | ReleaseVersion | PartialSums | Heartbeat
DataMessage = (
    RemoteTask
    | CancelTask
    | RemoteEvaluateTask
    | GradientStarted
    | RemoteTaskDone
    | RemoteTaskCancelled
    | ControlHeader
    | ShardCommand
    | UpdateDone
    | GradientReceived
)
KINDS: list[type[Any]] = [*get_args(DataMessage)]


def _optional(number: float) -> int | None:
    return None if isnan(number) else int(number)


_READ: dict[Any, Callable[[float], object]] = {int: int, float: float, bool: bool, int | None: _optional}
_FIELDS = [[_READ[hint] for hint in get_type_hints(kind).values()] for kind in KINDS]


def encode(message: DataMessage) -> Tensor:
    """Return a message as float64 [NUMBERS]; integers are exact up to 2^53.

    >>> decode(encode(RemoteTask(3, 7, True, 0.5, None, None, None)))
    RemoteTask(draw=3, version=7, sends_version=True, run_s=0.5, shard=None, epoch=None, number=None, checksum=None)
    """
    numbers = [nan if value is None else float(value) for value in message]
    padding = [0.0] * (NUMBERS - 1 - len(numbers))
    return torch.tensor([KINDS.index(type(message)), *numbers, *padding], dtype=torch.float64)


def empty_header() -> Tensor:
    """Return memory for a header."""
    return torch.zeros(NUMBERS, dtype=torch.float64)


def decode(numbers: Tensor) -> DataMessage:
    """Return the message of a header.

    Raises:
        ValueError: the header has an unknown kind.
    """
    kind, *values = numbers.tolist()
    if kind not in range(len(KINDS)):
        raise ValueError(f"header of unknown kind {kind}")
    read = _FIELDS[int(kind)]
    message: DataMessage = KINDS[int(kind)](*[each(value) for each, value in zip(read, values, strict=False)])
    return message
