"""Limits of the shares: the memory of each rank's device, and the sizes that a compiler takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_SIZES = 6  # of a rank's batch under torch.compile, which gives up a function that was compiled for eight


class ShareLimits(NamedTuple):
    """Limits of the shares of an update.

    Attributes:
        most: largest share of each rank, in samples, at least that of equal shares while no rank is lost.
        is_compiled: whether each rank may have a few sizes only.
    """

    most: tuple[int, ...]
    is_compiled: bool = False


def longest(shares: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds of an update of these shares, given the seconds per sample of each rank."""
    return max(share * each for share, each in zip(shares, seconds, strict=True))


def are_few(divisions: Sequence[tuple[int, ...]]) -> bool:
    """Return whether no rank has more than six sizes in divisions of an update.

    >>> are_few([(8, 8), (9, 7)])
    True
    """
    return all(len({*sizes}) <= MOST_SIZES for sizes in zip(*divisions, strict=True))


def of_few_sizes(
    new: tuple[int, ...], used: Sequence[tuple[int, ...]], seconds: Sequence[float], most: Sequence[int]
) -> tuple[int, ...]:
    """Return new shares, or the best ones that were used before, if a rank would have more than six sizes.

    Args:
        new: samples of each rank.
        used: shares that were used before, equal ones among them.
        seconds: seconds per sample of each rank.
        most: largest share of each rank.

    Example:
        >>> of_few_sizes((10, 6), [(8, 8), (9, 7)], [0.1, 0.2], [12, 12])
        (10, 6)
        >>> of_few_sizes((14, 2), [(8, 8), (9, 7), (10, 6), (11, 5), (12, 4), (13, 3)], [0.1, 0.2], [12, 12])
        (11, 5)
    """
    if are_few([new, *used]):
        return new
    fitting = [each for each in used if all(share <= limit for share, limit in zip(each, most, strict=True))]
    return min(fitting, key=lambda each: longest(each, seconds))
