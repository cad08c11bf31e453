"""A learning rate that falls with the distance the parameters have moved since a gradient read them."""

from __future__ import annotations

from dataclasses import dataclass
from sys import float_info
from typing import TYPE_CHECKING, ClassVar

from paceline.argument_types import checked_types
from paceline.checks import check
from paceline.compensation.base import Compensator, Delayed, Kind
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.compensation.base import Memory


@checked_types
@dataclass(frozen=True, repr=False)
class StalenessLR(Compensator):
    """Steps with eta_j = min(C / ||w_j - w_tau(j)||^2, eta_max), each gradient with its own.

    eta_max is the optimizer's own rate, schedule included, so that the factor on a gradient's step is
    min(C / (eta_max ||w_j - w_tau(j)||^2), 1), and 1 for a gradient that is not stale.

    Args:
        C: > 0, of the order of the error floor that is wished for; give it or error_floor.
        error_floor: of the loss above its minimum, > 0, which is taken for C as the paper suggests. The bound behind
            it (Theorem 4) has C L^2 / 2 in place of C: where L is known, `pl.theory` gives the C for a floor.

    Source: Dutta et al., "Slow and Stale Gradients Can Win the Race", 2018, eq. (13).

    Differs from the paper, which has K = 1: an update of K gradients is the mean of their steps. A rule by which the
    learning rate follows the quorum multiplies both terms of the minimum.
    """

    C: float | None = None
    error_floor: float | None = None

    name: ClassVar[str] = "staleness_lr"
    kind: ClassVar[Kind] = "scale"

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise UsageError(f"staleness_lr was given {given or 'neither C nor error_floor'}; expected one of the two")
        check("(0, inf)", **given)

    @property
    def formula(self) -> str:
        """Factor on the learning rate."""
        return "min(C / (eta_max ||w_j - w_tau(j)||^2), 1)"

    def compensate(self, delayed: Delayed, memory: Memory) -> float:
        """Return the factor, which is never quite zero."""
        C = self.C or self.error_floor
        assert C is not None
        moved = delayed.learning_rate * delayed.squared_distance
        return max(C / moved, float_info.min) if moved > C else 1.0
