"""Bisection search for the switch point, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Integral

from paceline.errors import UsageError
from paceline.utils.validation import check_range

ROUNDING = 1e-12  # tolerance, so that means of equal decimals are equal in any order of addition
STEADY, STEADY_WITHIN = 5, 0.001  # evaluations in a row, and the largest difference of two of them


def accepts(accuracies: Sequence[float | None], target: float, margin: float, two_sided: bool = False) -> bool:
    """Return whether the mean of the accuracies is at least target - margin.

    Args:
        accuracies: final accuracies of the trial runs, in [0, 1]; None or nan for a run that diverged, which fails all.
        target: target accuracy, in (0, 1].
        margin: largest shortfall of the mean, in [0, 1).
        two_sided: whether the mean must also be at most target + margin, as in the printed Algorithm 1.

    A shortfall of exactly the margin is accepted, although in binary 0.021 - 0.01 is more than 0.011.

    Example:
        >>> accepts([0.92, 0.93], target=0.93, margin=0.01), accepts([0.92, None], target=0.93, margin=0.01)
        (True, False)
        >>> accepts([0.97], target=0.93, margin=0.01), accepts([0.97], target=0.93, margin=0.01, two_sided=True)
        (True, False)

    Source: Li et al. (Sync-Switch), ICDCS 2021, Algorithm 1, line 13. Differs: one-sided by default, because a switch
    point may be more accurate than BSP.
    """
    finished = [accuracy for accuracy in accuracies if accuracy is not None and isfinite(accuracy)]
    if len(finished) < len(accuracies) or not finished:
        return False
    mean = sum(finished) / len(finished)
    margin += ROUNDING
    return mean >= target - margin and not (two_sided and mean > target + margin)


def converged_accuracy(accuracies: Sequence[float]) -> float | None:
    """Return the accuracy of a run after five evaluations in a row within 0.1 %; None if there are no such five.

    Args:
        accuracies: accuracy of each evaluation in the order of versions, in [0, 1].

    Example:
        >>> converged_accuracy([0.5, 0.9, 0.9, 0.9005, 0.9, 0.901, 0.95]), converged_accuracy([0.5, 0.9, 0.91])
        (0.901, None)

    Source: Li et al. (Sync-Switch), ICDCS 2021, Sect. VI-A: "not changed for more than 0.1% for five evaluations".
    """
    for end in range(STEADY, len(accuracies) + 1):
        last = accuracies[end - STEADY : end]
        if max(last) - min(last) <= STEADY_WITHIN + ROUNDING:
            return last[-1]
    return None


Accuracies = Sequence[float | None]


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """Bisection for the smallest fraction of the workload under the first protocol that keeps an accuracy.

    The fraction s lies in (lower, upper], initially (0, 1]. The middle is tried. It becomes ``upper`` if it is accepted
    and ``lower`` if not. After M settings the result is ``upper``: an accepted fraction, or 1 if none was accepted,
    which means to keep the first protocol to the end. If accuracy grows with s, the result is at most 2^-M above the
    smallest s that would be accepted.

    Args:
        target: target accuracy A, in (0, 1].
        margin: largest shortfall beta of the mean accuracy, in [0, 1).
        settings: number M of fractions to try, >= 1.
        two_sided: whether a mean above A + beta is also rejected.

    Raises:
        UsageError: an argument is out of its range.

    Example:
        >>> search = Bisection(target=0.9, margin=0.01, settings=3)
        >>> tried = []
        >>> while (fraction := search.next_fraction(tried)) is not None:
        ...     tried.append((fraction, [0.9 if fraction >= 0.2 else 0.8]))
        >>> [fraction for fraction, _ in tried], search.found(tried)
        ([0.5, 0.25, 0.125], 0.25)

    Source: Li et al. (Sync-Switch), ICDCS 2021, Sect. IV-B1 and Algorithm 1, which counts in percent.

    Differs from the paper: acceptance is one-sided, mean >= A - beta, unless ``two_sided`` selects the printed
    ``|mean - A| <= beta``, which rejects switch points that are more accurate than BSP. The sum alpha' of accuracies
    starts at 0 for each setting; the pseudo-code resets it only once, so that every mean but the first would be too
    large. A run that diverged fails its setting.
    """

    target: float
    margin: float = 0.01
    settings: int = 5
    two_sided: bool = False

    def __post_init__(self) -> None:
        if not _is_number(self.target) or not 0 < self.target <= 1:
            raise UsageError(f"target={self.target!r}, expected a share in (0, 1]{as_share(self.target)}")
        if not _is_number(self.margin) or not 0 <= self.margin < 1:
            raise UsageError(f"margin={self.margin!r}, expected a share in [0, 1){as_share(self.margin)}")
        check_range("[1, inf)", Integral, settings=self.settings)
        if not isinstance(self.two_sided, bool):
            raise UsageError(f"two_sided={self.two_sided!r}, expected True or False")

    def accepts(self, accuracies: Accuracies) -> bool:
        """Return whether a setting keeps the accuracy; None or nan is the accuracy of a run that diverged."""
        return accepts(accuracies, self.target, self.margin, self.two_sided)

    def next_fraction(self, tried: Sequence[tuple[float, Accuracies]]) -> float | None:
        """Return the next fraction to try; None after the last setting.

        Args:
            tried: fractions with their final accuracies, in the order of the search.
        """
        lower, upper = self._bracket(tried)
        return (lower + upper) / 2 if len(tried) < self.settings else None

    def found(self, tried: Sequence[tuple[float, Accuracies]]) -> float:
        """Return the smallest accepted fraction; 1.0 if none was accepted."""
        return self._bracket(tried)[1]

    def _bracket(self, tried: Sequence[tuple[float, Accuracies]]) -> tuple[float, float]:
        lower, upper = 0.0, 1.0
        for fraction, accuracies in tried:
            if self.accepts(accuracies):
                upper = fraction
            else:
                lower = fraction
        return lower, upper


def as_share(given: object) -> str:
    """Return advice for a number that looks like percent.

    >>> as_share(92.5)
    '; if this is percent, give 0.925'
    """
    is_percent = isinstance(given, int | float) and 1 <= given <= 100
    return f"; if this is percent, give {given / 100:g}" if is_percent else ", as 0.925"  # type: ignore[operator]


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)
