"""How workers without a server come to the same parameters: by all-reduce, in four knobs."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Literal

from paceline.errors import UsageError
from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range

if TYPE_CHECKING:
    from paceline.policies.compensation.base import Compensator


@checked_types
@dataclass(frozen=True)
class AllReduceConfig:
    """What n workers without a server sum up, and when.

    Every worker holds the average parameters w. In an iteration each computes a gradient, of which there is one
    each in an update, and hands something in; the sum over all of them is the same everywhere.

    Args:
        sums: "gradients", whose mean is stepped with everywhere, at the same parameters; or "updates": each worker
            steps for itself, from the average, and the average moves by the mean of their steps.
        overlaps: whether the next gradient is computed while the sum is made, at the worker's own parameters, which
            are the average before plus its own step.
        correction: of a gradient that was computed so, for the distance between its worker's parameters and the
            average; None for no correction.
        period: iterations from one sum to the next, >= 1; between two of them each worker goes its own way.

    Raises:
        UsageError: a knob is out of its range.

    Source: Rigazzi, "DC-S3GD", 2019, Sect. III (updates that overlap, with a correction).
    """

    sums: Literal["gradients", "updates"]
    overlaps: bool = False
    correction: Compensator | None = None
    period: int = 1

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, period=self.period)
        if self.correction is not None and getattr(self.correction, "kind", "") != "correction":
            raise UsageError(f"correction={self.correction!r}, expected a compensator that corrects, or None")
        if self.sums == "gradients" and (self.overlaps or self.period > 1):
            raise UsageError("gradients are summed in every iteration, before the next one; give sums='updates'")
        if self.overlaps and self.period > 1:
            raise UsageError(f"overlaps=True sums in every iteration, given period={self.period}; expected one of them")
        if self.correction is not None and not self.overlaps:
            raise UsageError(f"{self.correction!r} corrects gradients that overlap a sum; give overlaps=True")

    def communicates(self, iteration: int) -> bool:
        """Return whether there is a sum after this iteration; they count from 1."""
        return iteration % self.period == 0
