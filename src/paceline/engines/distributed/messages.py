"""What server and workers say to each other: numbers in a header of fixed size, text as JSON, nothing pickled."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, nan
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from paceline.engines.replica import Measured
from paceline.events import Minibatch

NUMBERS = 16  # in a header


class Work(NamedTuple):
    """Compute the gradient of a minibatch at a version.

    Attributes:
        sends_version: whether the version follows; else the worker has it already.
        run_s: seconds since the run began.
        shard: of the minibatch; None where the worker draws for itself, and so the next two.
    """

    draw: int
    version: int
    sends_version: bool
    run_s: float
    shard: int | None
    epoch: int | None
    number: int | None

    @property
    def minibatch(self) -> Minibatch | None:
        """Which samples."""
        return None if self.shard is None else Minibatch(self.shard, self.epoch, self.number)


class Interrupting(NamedTuple):
    """Abandon your work up to this draw."""

    draw: int


class Evaluation(NamedTuple):
    """Measure the version that follows."""

    version: int


class Begun(NamedTuple):
    """The first piece of a gradient follows, while the others are still being computed.

    Attributes:
        busy_s: from the arrival of the work to this.
    """

    draw: int
    busy_s: float


class Finished(NamedTuple):
    """The gradient of a draw; what of it has not come yet follows.

    Attributes:
        again: the pieces that come a second time, as a number with a bit for each.
        busy_s: from the arrival of the work to this.
        loss: and what comes after it, as in `Measured`.
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
    def measured(self) -> Measured:
        """Scalars of the gradient."""
        return Measured(*self[3:])


class Abandoned(NamedTuple):
    """The work was interrupted; its version is not read any more.

    Attributes:
        gone: the pieces of its gradient that had been sent, as a number with a bit for each.
    """

    draw: int
    gone: int


class Ending(NamedTuple):
    """The run is over; the parameters follow, and then a text that says why."""

    version: int


class Text(NamedTuple):
    """So many bytes of JSON follow."""

    nbytes: int


Message = Work | Interrupting | Evaluation | Begun | Finished | Abandoned | Ending | Text
KINDS: list[type[Any]] = [Work, Interrupting, Evaluation, Begun, Finished, Abandoned, Ending, Text]


def _optional(number: float) -> int | None:
    return None if isnan(number) else int(number)


_READ: dict[Any, Callable[[float], object]] = {int: int, float: float, bool: bool, int | None: _optional}
_FIELDS = [[_READ[hint] for hint in get_type_hints(kind).values()] for kind in KINDS]


def encode(message: Message) -> Tensor:
    """Return a message as float64 [NUMBERS]; whole numbers are exact up to 2^53.

    >>> decode(encode(Work(3, 7, True, 0.5, None, None, None)))
    Work(draw=3, version=7, sends_version=True, run_s=0.5, shard=None, epoch=None, number=None)
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
