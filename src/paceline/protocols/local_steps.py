"""Local steps: a worker steps its own parameters on several minibatches before it hands in their change."""

from __future__ import annotations

from numbers import Integral
from typing import ClassVar

from paceline.errors import UsageError
from paceline.protocols.outer_optimizer import DelayedNesterov, OuterSGD
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_optional_range

FIRST_BUDGET = 8
UNLIMITED = 1_000_000


@checked_dataclass(frozen=True, repr=False)
class LocalSteps:
    """Local steps of the job's optimizer, and the outer optimizer of the server.

    A worker that is given version v takes steps from it, one on each minibatch. Its pseudo-gradient is v minus its
    parameters after the last step. The server steps its outer optimizer with the mean of the accepted
    pseudo-gradients, weighted by samples. The state of the job's optimizer stays with the worker; that of work whose
    pseudo-gradient was not accepted is discarded.

    Args:
        H: largest number of steps, >= 1; None for no limit.
        seconds: time for the steps, > 0; None for exactly H steps. The worker takes another step if one of mean length
            fits, and at least one.
        outer: optimizer of the server; None to continue from the mean of the workers' parameters.

    Raises:
        UsageError: neither H nor seconds is given, or one is out of its range.

    Example:
        >>> LocalSteps(seconds=5).takes_another(steps=3, elapsed_s=4.0)
        False

    Source: Stich, "Local SGD", 2019; Douillard et al., "DiLoCo", 2023, Algorithm 1 (outer optimizer); Ferdinand et al.,
    "Anytime minibatch", 2019 (as many steps as fit into a time).
    """

    H: int | None = None
    seconds: float | None = None
    outer: OuterSGD | DelayedNesterov | None = None

    name: ClassVar[str] = "local_steps"

    def __post_init__(self) -> None:
        check_optional_range("[1, inf)", Integral, H=self.H)
        check_optional_range("(0, inf)", seconds=self.seconds)
        if self.H is None and self.seconds is None:
            raise UsageError(
                "local_steps() has neither a number of steps nor a time; type for example local_steps(H=16) or "
                "local_steps(seconds=5)"
            )

    def __repr__(self) -> str:
        return short_repr(self, self.name)

    @property
    def most(self) -> int:
        """Largest number of steps."""
        return UNLIMITED if self.H is None else self.H

    def first_number(self, draw: int) -> int:
        """Return the number of the first minibatch of a draw, if a worker draws its samples itself.

        With H steps in every draw, these are the minibatches of H draws without local steps.
        """
        return (draw - 1) * self.most + 1

    def budget(self, before: int) -> int:
        """Return the number of minibatches to assign to a worker.

        Args:
            before: number that its latest gradient has used, >= 1.
        """
        if self.seconds is None:
            return self.most
        return min(self.most, max(FIRST_BUDGET, 2 * before))

    def takes_another(self, steps: int, elapsed_s: float) -> bool:
        """Return whether a worker takes another step.

        Args:
            steps: number of steps so far, >= 1.
            elapsed_s: seconds that they took.
        """
        if steps >= self.most:
            return False
        return self.seconds is None or elapsed_s * (steps + 1) <= self.seconds * steps
