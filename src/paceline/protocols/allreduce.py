"""Configuration of synchronization by all-reduce, without a server."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Literal

from paceline.errors import UsageError
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.validation import check_range

if TYPE_CHECKING:
    from paceline.policies.compensation.base import Compensator
    from paceline.policies.outer_optimizer import OuterSGD


@checked_dataclass(frozen=True)
class AllReduceConfig:
    """All-reduce among n workers without a server.

    Every worker holds the average parameters w. In an iteration, each worker computes one gradient and contributes a
    vector; all workers receive the same sum of these vectors. One gradient of each worker makes an update.

    Args:
        sums: "gradients": every worker steps with the mean gradient; or "updates": every worker steps with its own
            gradient from the average, and the average moves by the mean of these steps.
        overlaps: whether the next gradient is computed during the all-reduce, at the previous average plus the
            worker's own step.
        correction: correction of such a gradient for the distance between the worker's parameters and the average;
            None for no correction.
        period: iterations from one all-reduce to the next, >= 1; in between, each worker steps by itself.
        outer: optimizer that steps the average with the mean of the workers' steps; None for that mean itself.

    Raises:
        UsageError: a knob is out of its range.

    Source: Rigazzi, "DC-S3GD", 2019, Sect. III (updates that overlap, with a correction); Douillard et al., "DiLoCo",
    2023 (outer optimizer).
    """

    sums: Literal["gradients", "updates"]
    overlaps: bool = False
    correction: Compensator | None = None
    period: int = 1
    outer: OuterSGD | None = None

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
        if self.outer is not None and (self.overlaps or self.sums == "gradients"):
            raise UsageError(f"{self.outer!r} steps with updates that do not overlap; give sums='updates' alone")

    def communicates(self, iteration: int) -> bool:
        """Return whether an all-reduce follows this iteration; iterations count from 1."""
        return iteration % self.period == 0
