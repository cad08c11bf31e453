"""Configuration of synchronization by all-reduce, without a server."""

from __future__ import annotations

from numbers import Integral
from typing import Literal

from paceline.errors import UsageError
from paceline.protocols.additions import CompensatorPart
from paceline.protocols.outer_optimizer import OuterSGD
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.validation import check_range


@checked_dataclass(frozen=True, kw_only=True)
class AllReduceConfig:
    """All-reduce among n workers without a server.

    Every worker holds the average parameters w. In an iteration, each worker computes one gradient and contributes a
    vector; all workers receive the same sum of these vectors. One gradient of each worker makes an update.

    Args:
        sums: "gradients": every worker steps with the mean gradient; or "updates": every worker steps with its own
            gradient from the average, and the average moves by the mean of these steps.
        lag: number of gradients that each worker computes while an all-reduce is under way, >= 0. A worker's
            parameters are the average plus its own steps that no completed sum contains.
        correction: correction of such a gradient for the distance that a completed sum moves the worker's parameters;
            None for no correction.
        period: iterations from one all-reduce of a parameter to the next, >= 1; in between, each worker steps by
            itself.
        fragments: number of fragments of the model that are summed in turn, one every period / fragments iterations,
            >= 1; a divisor of the period.
        outer: optimizer that steps the average with the mean of the workers' steps; None for that mean itself.

    Raises:
        UsageError: a knob is out of its range.

    Source: Rigazzi, "DC-S3GD", 2019, Sect. III (updates that overlap, with a correction); Douillard et al., "DiLoCo",
    2023 (outer optimizer); Douillard et al., "Streaming DiLoCo", 2025 (fragments).
    """

    sums: Literal["gradients", "updates"]
    lag: int = 0
    correction: CompensatorPart | None = None
    period: int = 1
    outer: OuterSGD | None = None
    fragments: int = 1

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, period=self.period, fragments=self.fragments)
        check_range("[0, inf)", Integral, lag=self.lag)
        if self.correction is not None and getattr(self.correction, "kind", "") != "correction":
            raise UsageError(f"correction={self.correction!r}, expected a compensator that corrects, or None")
        if self.sums == "gradients" and (self.lag or self.period > 1):
            raise UsageError("gradients are summed in every iteration, before the next one; give sums='updates'")
        if self.period % self.fragments:
            raise UsageError(
                f"fragments={self.fragments}, expected a divisor of the period {self.period}, so that one fragment is "
                "summed every few iterations"
            )
        if self.sums == "gradients" and self.outer is not None:
            raise UsageError(f"{self.outer!r} steps with the workers' updates; give sums='updates'")
        if self.correction is not None and (self.lag == 0 or self.period > 1):
            raise UsageError(f"{self.correction!r} corrects the gradient after each sum; give lag=1 and period=1")

    @property
    def overlaps(self) -> bool:
        """Whether gradients are computed while an all-reduce is under way."""
        return self.lag > 0

    @property
    def separates_steps(self) -> bool:
        """Whether workers keep apart their own steps that no completed sum contains.

        So they do where there are several steps, of which a sum may not contain all, and where a sum has one fragment
        of the model.
        """
        return self.lag > 1 or self.period > 1

    @property
    def leaves_steps_out(self) -> bool:
        """Whether the workers have own steps beside a completed sum, which an evaluation has to add."""
        return self.lag > 1 or (self.lag == 1 and self.period > 1) or self.fragments > 1

    def begins_sum(self, iteration: int) -> bool:
        """Return whether an all-reduce begins after this iteration; iterations count from 1."""
        return self.summed_fragment(iteration) is not None

    def summed_fragment(self, iteration: int) -> int | None:
        """Return the fragment whose all-reduce begins after this iteration; None if there is none.

        >>> config = AllReduceConfig(sums="updates", period=6, fragments=3)
        >>> [config.summed_fragment(iteration) for iteration in range(1, 9)]
        [None, 0, None, 1, None, 2, None, 0]
        """
        count, rest = divmod(iteration, self.period // self.fragments)
        return (count - 1) % self.fragments if rest == 0 else None

    def awaited_sum(self, iteration: int) -> int | None:
        """Return the iteration whose all-reduce this iteration waits for; None if there is none.

        The gradient of the next iteration is computed before the wait, if sums overlap gradients. Iteration 0 stands
        for the last one of an earlier group of workers.

        >>> [AllReduceConfig(sums="updates", period=2, lag=3).awaited_sum(iteration) for iteration in range(3, 7)]
        [None, 2, None, 4]
        """
        begun = iteration - max(0, self.lag - 1)
        return begun if begun >= 0 and self.begins_sum(begun) else None
