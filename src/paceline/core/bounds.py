"""Bounds of numbers that come from a file or from another process; msgspec checks them while it decodes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

LARGEST = 1 << 53  # whole numbers that a float holds exactly
MOST_AT_ONCE = 1 << 32  # of one gradient, so that the sum over the gradients of an update is not above LARGEST
LONGEST_S = 1e9
LONGEST_TEXT = 4000  # characters of a text of another process, where it is shown or recorded
MOST_METRICS = 10_000
MOST_WORKERS = 100_000
MOST_COMPENSATORS = 16
MOST_IN_SINGLE = 3.4e38  # torch refuses a learning rate that a parameter in single precision cannot have

Whole = Annotated[int, Meta(ge=0, le=LARGEST)]
CountOrNone = Annotated[int, Meta(ge=0, le=MOST_AT_ONCE)]
Port = Annotated[int, Meta(ge=1, le=(1 << 16) - 1)]
Single = Annotated[float, Meta(ge=-MOST_IN_SINGLE, le=MOST_IN_SINGLE)]
# Option of an optimizer: a part of a tuple may be infinite, as the largest step of Rprop.
Option = None | bool | int | Single | str | tuple[bool | int | float | str | None, ...]
Weight = Annotated[float, Meta(gt=0, le=LARGEST)]  # of a gradient in a mean
Share = Annotated[float, Meta(gt=0, le=LARGEST)]
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_S)]
Metrics = Annotated[dict[Annotated[str, Meta(max_length=1000)], float], Meta(max_length=MOST_METRICS)]


def check_norms(squared_norm: float, variance: float) -> None:
    """Check squares that a worker has measured; nan is a value that was not measured.

    Raises:
        ValueError: one of them is negative.
    """
    if squared_norm < 0 or variance < 0:
        raise ValueError(f"squared norm {squared_norm}, variance {variance}, expected no negative number")
