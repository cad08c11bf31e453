"""How much of the optimizer's momentum a phase goes on with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from paceline.errors import UsageError, did_you_mean
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.state_dict import Stateful

LIMITS: Mapping[str, Callable[[int, int], float]] = {
    "keep": lambda i, n: inf,
    "zero": lambda i, n: 0.0,
    "1/n": lambda i, n: 1 / n,
    "i/n": lambda i, n: i / n,
    "2^i/n": lambda i, n: 2.0 ** min(i, 64) / n,  # 2.0**1024 would raise an OverflowError
}


@checked_dataclass(frozen=True)
class Momentum:
    """Limit on the momentum of the optimizer from the beginning of a phase on.

    momentum = min(own, limit(i, n)), where own is the optimizer's, i the whole epochs of workload since the phase
    began, and n the live workers: a ramp ends where it reaches the own momentum.

    Args:
        rule: "keep" (no limit), "zero", "1/n", "i/n" or "2^i/n".

    Raises:
        UsageError: no such rule.

    Example:
        >>> [Momentum("i/n").limit(i, n=8) for i in (0, 1, 4)]
        [0.0, 0.125, 0.5]

    Source: Li et al. (Sync-Switch) 2021, Sect. IV-C and Fig. 8b; they keep it.
    """

    rule: str

    def __post_init__(self) -> None:
        if self.rule not in LIMITS:
            raise UsageError(f"momentum rule {self.rule!r} is not known{did_you_mean(str(self.rule), LIMITS)}")

    def __repr__(self) -> str:
        return f"momentum(rule='{self.rule}')"

    @property
    def counts_epochs(self) -> bool:
        """Whether the limit depends on the epochs since the phase began."""
        return "i" in self.rule

    def limit(self, i: int, n: int) -> float:
        """Return the largest momentum after i >= 0 epochs of the phase with n >= 1 workers; inf for any.

        A ramp that has reached 1 is no limit any more.
        """
        limit = LIMITS[self.rule](i, n)
        return limit if limit < 1 else inf


KEEP = Momentum("keep")


class MomentumTracker(Stateful):
    """State of the momentum limit during a run.

    Args:
        per_epoch: gradients of one epoch; None if the data have no length.
    """

    _saved = ("limit", "_began")

    def __init__(self, per_epoch: float | None) -> None:
        self.limit = inf
        self._per_epoch = per_epoch
        self._began = 0  # the phase, after this workload

    def begin(self, workload: int) -> None:
        """Begin a phase after a workload, in gradients."""
        self._began = workload

    def follow(self, momentum: Momentum, workload: int, live: int) -> str:
        """Set the limit of an update after this workload; return the reason of a change, else an empty string."""
        i = int((workload - self._began) / self._per_epoch) if self._per_epoch else 0
        limit = momentum.limit(i, live)
        if limit == self.limit:
            return ""
        self.limit = limit
        text = f"at most {limit:.4g}" if limit < inf else "the optimizer's own"
        return f"{text}: {momentum.rule} after {i} epochs of this phase"
