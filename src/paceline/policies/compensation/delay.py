"""Delay compensation: first-order correction of a stale gradient to the current parameters."""

from __future__ import annotations

from math import inf, sqrt
from typing import TYPE_CHECKING, ClassVar

from paceline.policies.compensation.base import AdaptiveKnobs, Compensator, StaleGradient
from paceline.protocols.additions import Kind
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.validation import check_optional_range, check_range

if TYPE_CHECKING:
    from paceline.policies.compensation.base import Memory

MEAN_SQUARE = "mean_square"
REPRESENTABLE = "[0, 1e30]"  # in single precision, with a margin


@checked_dataclass(frozen=True, repr=False)
class DCASGD(Compensator):
    """DC-ASGD correction: adds lambda * g * g * (w_now - w_then) to the gradient g.

    This is a first-order Taylor step of the gradient, with g * g for the Hessian. Products are element by element. With
    `m`, lambda adapts to each element:

        lambda = lambda0 / sqrt(mean_square + epsilon),   mean_square = m * mean_square + (1 - m) g * g.

    Every gradient counts in the mean square, including fresh ones.

    Args:
        lambda0: strength of the correction, in [0, 1e30]; in the paper 0.04 if constant, 2 if adaptive.
        m: decay of the mean square, in [0, 1), 0.95 in the paper; None for a constant lambda.
        epsilon: term against division by 0, > 0.

    Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017, eq. (10) and
    its Section 6 (DC-ASGD-c and DC-ASGD-a).
    """

    lambda0: float
    m: float | None = None
    epsilon: float = 1e-7

    name: ClassVar[str] = "dc_asgd"
    kind: ClassVar[Kind] = "correction"

    def __post_init__(self) -> None:
        check_range(REPRESENTABLE, lambda0=self.lambda0)
        check_range("(0, inf)", epsilon=self.epsilon)
        check_optional_range("[0, 1)", m=self.m)

    @property
    def formula(self) -> str:
        """The correction."""
        adapted = "" if self.m is None else " / sqrt(mean square)"
        return f"g + lambda{adapted} g g (w_now - w_then)"

    def compensate(self, stale: StaleGradient, memory: Memory) -> float:
        """Correct the gradient, and return lambda0, or 0 if the gradient is fresh."""
        if self.m is not None:
            if MEAN_SQUARE not in memory:
                memory[MEAN_SQUARE] = stale.zeros()
            knobs = AdaptiveKnobs(self.m, self.epsilon, self.lambda0)
            stale.add_adaptive_correction(memory[MEAN_SQUARE], knobs)
        elif stale.staleness:
            stale.add_correction(self.lambda0)
        return float(self.lambda0) if stale.staleness else 0.0


@checked_dataclass(frozen=True, repr=False)
class DCS3GD(Compensator):
    """DC-S3GD correction: adds lambda * g * g * D with D = w_now - w_then and lambda = lambda0 ||g|| / ||g * g * D||.

    The correction is lambda0 times as long as the gradient for every distance D other than 0.

    Args:
        lambda0: length of the correction relative to the gradient, in [0, 1e30]; 0.2 in the paper.

    Source: Rigazzi, "DC-S3GD", 2019, eq. (10) and (17).
    """

    lambda0: float = 0.2

    name: ClassVar[str] = "dc_s3gd"
    kind: ClassVar[Kind] = "correction"

    def __post_init__(self) -> None:
        check_range(REPRESENTABLE, lambda0=self.lambda0)

    @property
    def formula(self) -> str:
        """The correction."""
        return "g + lambda0 ||g|| / ||g g D|| g g D"

    def compensate(self, stale: StaleGradient, memory: Memory) -> float:
        """Correct the gradient, and return lambda."""
        if not stale.staleness or not stale.squared_norm:
            return 0.0
        # Scaled by the mean square of g, because the square of a product of three small numbers may underflow.
        mean_square = stale.squared_norm / stale.elements
        squared_length = stale.squared_length(1 / mean_square)
        if not 0 < squared_length < inf:
            return 0.0
        lambda_ = self.lambda0 * sqrt(stale.squared_norm / squared_length) / mean_square
        stale.add_correction(lambda_)
        return lambda_
