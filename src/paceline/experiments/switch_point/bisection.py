"""Which switch point is tried next, and which one was found. Numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Integral

from paceline.errors import UsageError
from paceline.utils.validation import check_range

ROUNDING = 1e-12  # of accuracies: equal decimals are equal, in whichever order they were added


def accepts(accuracies: Sequence[float | None], target: float, margin: float, two_sided: bool = False) -> bool:
    """Return whether the mean of the accuracies is at least target - margin.

    Args:
        accuracies: of the trial runs, shares; None or nan for a run that has diverged, which fails them all.
        target: accuracy to be kept, a share.
        margin: by which the mean may fall short, a share.
        two_sided: whether the mean may not be above target + margin either, as Algorithm 1 is printed.

    A mean that is off by the margin exactly is accepted, though in binary 0.021 - 0.01 is more than 0.011.

    Example:
        >>> accepts([0.92, 0.93], target=0.93, margin=0.01), accepts([0.92, None], target=0.93, margin=0.01)
        (True, False)
        >>> accepts([0.97], target=0.93, margin=0.01), accepts([0.97], target=0.93, margin=0.01, two_sided=True)
        (True, False)

    Source: Li et al. (Sync-Switch), ICDCS 2021, Algorithm 1, line 13. Differs: one-sided by default, because a switch
    point is no worse for being more accurate than BSP.
    """
    finished = [accuracy for accuracy in accuracies if accuracy is not None and isfinite(accuracy)]
    if len(finished) < len(accuracies) or not finished:
        return False
    mean = sum(finished) / len(finished)
    margin += ROUNDING
    return mean >= target - margin and not (two_sided and mean > target + margin)


Accuracies = Sequence[float | None]


@dataclass(frozen=True)
class Bisection:
    """Looks for the smallest fraction of the workload under the first protocol that keeps an accuracy.

    The fraction s lies in (lower, upper], which is (0, 1] at the beginning; the middle is tried, and becomes `upper` if
    it is accepted and `lower` if not. After M settings, `upper` is what was found. It was accepted, or it is 1: nothing
    ever was, and the answer is to stay with the first protocol to the end.

    If accuracy grows with s, what is found is at most 2^-M above the smallest s that would be accepted.

    Args:
        target: A, the accuracy to be kept, a share in (0, 1].
        margin: beta, by which a mean may fall short of it, in [0, 1).
        settings: M, how many fractions are tried, >= 1.
        two_sided: whether a mean above A + beta is refused as well.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> search = Bisection(target=0.9, margin=0.01, settings=3)
        >>> tried = []
        >>> while (fraction := search.next_fraction(tried)) is not None:
        ...     tried.append((fraction, [0.9 if fraction >= 0.2 else 0.8]))
        >>> [fraction for fraction, _ in tried], search.found(tried)
        ([0.5, 0.25, 0.125], 0.25)

    Source: Li et al. (Sync-Switch), ICDCS 2021, Sect. IV-B1 and Algorithm 1, which counts in percent.
    Differs: acceptance is one-sided, mean >= A - beta, unless `two_sided` asks for the printed |mean - A| <= beta, by
    which a switch point that is more accurate than BSP would be thrown away. The sum alpha' of a setting's accuracies,
    which the pseudo-code sets to 0 once and never again, begins at 0 for each setting; as printed, every mean but the
    first would be too large. A run that has diverged fails its setting.
    """

    target: float
    margin: float = 0.01
    settings: int = 5
    two_sided: bool = False

    def __post_init__(self) -> None:
        if not _is_number(self.target) or not 0 < self.target <= 1:
            raise UsageError(f"target = {self.target!r}, expected a share in (0, 1]{as_share(self.target)}")
        if not _is_number(self.margin) or not 0 <= self.margin < 1:
            raise UsageError(f"margin = {self.margin!r}, expected a share in [0, 1){as_share(self.margin)}")
        check_range("[1, inf)", Integral, settings=self.settings)
        if not isinstance(self.two_sided, bool):
            raise UsageError(f"two_sided = {self.two_sided!r}, expected True or False")

    def accepts(self, accuracies: Accuracies) -> bool:
        """Return whether a setting keeps the accuracy, from its final accuracies; None or nan for a diverged run."""
        return accepts(accuracies, self.target, self.margin, self.two_sided)

    def next_fraction(self, tried: Sequence[tuple[float, Accuracies]]) -> float | None:
        """Return the fraction to be tried next; None if as many were tried as are to be.

        Args:
            tried: each fraction with its final accuracies, in the order in which this has asked for them.
        """
        lower, upper = self._bracket(tried)
        return (lower + upper) / 2 if len(tried) < self.settings else None

    def found(self, tried: Sequence[tuple[float, Accuracies]]) -> float:
        """Return the smallest fraction that was accepted, 1.0 if none was."""
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
    """Say how a number that looks like percent is to be given.

    >>> as_share(92.5)
    '; if this is percent, give 0.925'
    """
    is_percent = isinstance(given, int | float) and 1 <= given <= 100
    return f"; if this is percent, give {given / 100:g}" if is_percent else ", as 0.925"  # type: ignore[operator]


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)
