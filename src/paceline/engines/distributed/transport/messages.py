"""What server and workers say to each other: numbers in a header of fixed size, text as JSON, nothing pickled."""

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
    """Compute the gradient of a minibatch at a version.

    Attributes:
        sends_version: whether the version follows; else the worker has it already.
        run_s: seconds since the run began.
        shard: of the minibatch; None where the worker draws for itself, and so the next two.
        checksum: of the version as it travels, in debug mode.
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
        """Which samples."""
        return None if self.shard is None else Minibatch(self.shard, self.epoch, self.number)


class Interrupting(NamedTuple):
    """Abandon your work up to this draw."""

    draw: int


class RemoteEvaluateTask(NamedTuple):
    """Measure the version that follows."""

    version: int


class GradientStarted(NamedTuple):
    """The first piece of a gradient follows, while the others are still being computed.

    Attributes:
        busy_s: from the arrival of the work to this.
    """

    draw: int
    busy_s: float


class RemoteTaskDone(NamedTuple):
    """The gradient of a draw; what of it has not come yet follows.

    Attributes:
        again: the pieces that come a second time, as a number with a bit for each.
        busy_s: from the arrival of the work to this.
        loss: and what comes after it, as in `GradientStats`.
    """

    draw: int
    again: int
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
    """The work was interrupted; its version is not read any more.

    Attributes:
        gone: the pieces of its gradient that had been sent, as a number with a bit for each.
    """

    draw: int
    gone: int


class EndNotice(NamedTuple):
    """The run is over; the parameters follow, and then a text that says why."""

    version: int


class AssignTask(NamedTuple):
    """Give a worker its work: the slice's part of it.

    Attributes:
        ticket: of the worker at rank 0.
        sends_version: whether the worker is sent the version too.
    """

    ticket: int
    draw: int
    version: int
    sends_version: bool


class Evaluating(NamedTuple):
    """Send the process that evaluates the slice's part of a version."""

    ticket: int
    version: int


class AcceptGradient(NamedTuple):
    """Take the gradient of a worker into the open update."""

    worker: int
    samples: int
    step_scale: float


class ApplyUpdate(NamedTuple):
    """Make an update, as `Apply` says.

    Attributes:
        gradients: how many.
        elsewhere: whether the version before is still read, so that the next one may not take its place.

    >>> ApplyUpdate.of(Apply(7, (), 0.5, "enough"), elsewhere=True).update == Apply(7, (), 0.5, "")
    True
    """

    version: int
    gradients: int
    lr_scale: float
    measure: bool
    step_scale: float
    momentum_limit: float
    weight_decay_scale: float
    elsewhere: bool

    @classmethod
    def of(cls, update: Apply, elsewhere: bool) -> ApplyUpdate:
        """Return an update as it is told."""
        numbers = {name: getattr(update, name) for name in _TOLD}
        return cls(**numbers, gradients=len(update.gradients), elsewhere=elsewhere)

    @property
    def update(self) -> Apply:
        """The update; of its gradients, only their number is told."""
        numbers: dict[str, Any] = {name: getattr(self, name) for name in _TOLD}
        return Apply(**numbers, gradients=(Accept(0, 0, 0, 1),) * self.gradients, reason="")


_TOLD = [name for name in Apply._fields if name not in {"gradients", "reason"}]


class Updated(NamedTuple):
    """The slice has made an update."""

    version: int


class ReleaseVersion(NamedTuple):
    """Nobody reads a version any more."""

    version: int


class Heartbeat(NamedTuple):
    """Are you there, and the answer to it."""


class GradientReceived(NamedTuple):
    """The slice's part of a gradient is there.

    Attributes:
        ticket: of the worker at rank 0.
    """

    ticket: int
    draw: int


class Sums(NamedTuple):
    """The shares of a slice in some sums over elements, or the sums over all slices.

    Attributes:
        how_many: of the three are meant.
    """

    how_many: int
    first: float
    second: float
    third: float

    @property
    def values(self) -> list[float]:
        """The sums."""
        return list(self[1 : 1 + self.how_many])


def sums_of(values: Sequence[float]) -> Sums:
    """Return up to three sums as a message.

    >>> sums_of([1.5, 2.0]).values
    [1.5, 2.0]
    """
    return Sums(len(values), *values, *[0.0] * (3 - len(values)))


class Text(NamedTuple):
    """So many bytes of JSON follow."""

    nbytes: int


Command = AssignTask | Evaluating | AcceptGradient | ApplyUpdate | ReleaseVersion | Sums | Heartbeat
Message = (
    RemoteTask
    | Interrupting
    | RemoteEvaluateTask
    | GradientStarted
    | RemoteTaskDone
    | RemoteTaskCancelled
    | EndNotice
    | Text
    | Command
    | Updated
    | GradientReceived
)
KINDS: list[type[Any]] = [*get_args(Message)]


def _optional(number: float) -> int | None:
    return None if isnan(number) else int(number)


_READ: dict[Any, Callable[[float], object]] = {int: int, float: float, bool: bool, int | None: _optional}
_FIELDS = [[_READ[hint] for hint in get_type_hints(kind).values()] for kind in KINDS]


def encode(message: Message) -> Tensor:
    """Return a message as float64 [NUMBERS]; whole numbers are exact up to 2^53.

    >>> decode(encode(RemoteTask(3, 7, True, 0.5, None, None, None)))
    RemoteTask(draw=3, version=7, sends_version=True, run_s=0.5, shard=None, epoch=None, number=None, checksum=None)
    """
    numbers = [nan if value is None else float(value) for value in message]
    padding = [0.0] * (NUMBERS - 1 - len(numbers))
    return torch.tensor([KINDS.index(type(message)), *numbers, *padding], dtype=torch.float64)


def header() -> Tensor:
    """Return room for a message."""
    return torch.zeros(NUMBERS, dtype=torch.float64)


def decode(numbers: Tensor) -> Message:
    """Return the message of such numbers.

    Raises:
        ValueError: they are none.
    """
    kind, *values = numbers.tolist()
    if kind not in range(len(KINDS)):
        raise ValueError(f"a message of kind {kind}")
    read = _FIELDS[int(kind)]
    message: Message = KINDS[int(kind)](*[each(value) for each, value in zip(read, values, strict=False)])
    return message
