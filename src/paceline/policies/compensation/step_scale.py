"""Step scales for stale gradients: staleness-dependent learning rates and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, sqrt
from sys import float_info
from typing import TYPE_CHECKING, ClassVar

from paceline.errors import UsageError
from paceline.policies.compensation.base import Compensator, StaleGradient
from paceline.protocols.additions import Kind
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.validation import check_range

if TYPE_CHECKING:
    from paceline.policies.compensation.base import Memory


@checked_dataclass(frozen=True, repr=False)
class StalenessLR(Compensator):
    """Staleness learning rate: eta_j = min(C / ||w_j - w_tau(j)||^2, eta_max) for each gradient.

    eta_max is the learning rate of the optimizer, schedule included. So the factor on the step of a gradient is
    min(C / (eta_max ||w_j - w_tau(j)||^2), 1), and 1 for a fresh gradient.

    Args:
        C: bound on the learning rate times the squared distance, > 0, of the order of the wanted error floor; give
            this or error_floor.
        error_floor: wanted floor of the loss above its minimum, > 0, which the paper suggests for C. The bound of
            Theorem 4 has C L^2 / 2 in place of C: if L is known, `pl.theory.staleness_constant` returns the C.

    Source: Dutta et al., "Slow and Stale Gradients Can Win the Race", 2018, eq. (13).

    Differs from the paper, which has K = 1: an update of K gradients is the mean of their steps. If the learning rate
    follows the quorum, both terms of the minimum are multiplied by its factor.
    """

    C: float | None = None
    error_floor: float | None = None

    name: ClassVar[str] = "staleness_lr"
    kind: ClassVar[Kind] = "scale"
    reads_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise UsageError(f"staleness_lr was given {given or 'neither C nor error_floor'}; give one of the two")
        check_range("(0, inf)", **given)

    @property
    def formula(self) -> str:
        """Factor on the learning rate."""
        return "min(C / (eta_max ||w_j - w_tau(j)||^2), 1)"

    def compensate(self, stale: StaleGradient, memory: Memory) -> float:
        """Return the factor, which is always positive."""
        C = self.C or self.error_floor
        assert C is not None
        moved = stale.learning_rate * stale.squared_distance
        return max(C / moved, float_info.min) if moved > C else 1.0


WEIGHTS: Mapping[str, Callable[[int], float]] = {
    "1/(1+tau)": lambda tau: 1 / (1 + tau),
    "1/sqrt(1+tau)": lambda tau: 1 / sqrt(1 + tau),
    "1/(1+sqrt(tau))": lambda tau: 1 / (1 + sqrt(tau)),
}


@checked_dataclass(frozen=True, repr=False)
class StalenessWeight(Compensator):
    """Staleness weight: factor on the step of a gradient that depends on its staleness tau alone.

    Args:
        weighting: "1/(1+tau)", "1/sqrt(1+tau)" or "1/(1+sqrt(tau))", or a function from tau to a weight > 0, with 1 at
            tau = 0.

    Source: Zhang et al., "Staleness-aware Async-SGD", 2016 (1/tau from 1 on); Nguyen et al., "Federated Learning with
    Buffered Asynchronous Aggregation", 2022 (1/sqrt(1 + tau)).

    Example:
        >>> StalenessWeight("1/sqrt(1+tau)").weight(3)
        0.5
    """

    weighting: str | Callable[[int], float] = "1/(1+tau)"

    name: ClassVar[str] = "staleness_weight"
    kind: ClassVar[Kind] = "scale"
    reads_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.weighting, str) and self.weighting not in WEIGHTS:
            known = ", ".join(f"'{name}'" for name in WEIGHTS)
            raise UsageError(
                f"weighting={self.weighting!r}, expected {known}, or in Python a function from staleness to weight"
            )
        if self.weight(0) != 1:
            raise UsageError(f"{self.formula} is {self.weight(0)!r} at staleness 0; expected 1 for fresh gradients")

    def __repr__(self) -> str:
        """Return the call, with the name of a function without its address, which changes when a run is resumed."""
        return super().__repr__() if isinstance(self.weighting, str) else f"{self.name}(weighting={self.formula})"

    @property
    def formula(self) -> str:
        """The weight as a formula, or the name of the function."""
        return self.weighting if isinstance(self.weighting, str) else getattr(self.weighting, "__name__", "weight")

    def weight(self, tau: int) -> float:
        """Return the weight of a gradient of staleness tau, >= 0.

        Raises:
            UsageError: the function of the user returned no positive number.
        """
        weighting = WEIGHTS[self.weighting] if isinstance(self.weighting, str) else self.weighting
        weight = float(weighting(tau))
        if not 0 < weight < inf:
            raise UsageError(f"{self.formula} returned {weight!r} for staleness {tau}; expected a weight > 0")
        return weight

    def compensate(self, stale: StaleGradient, memory: Memory) -> float:
        """Return the weight."""
        return self.weight(stale.staleness)
