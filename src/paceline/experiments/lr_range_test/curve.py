"""Learning-rate range test: the rates of a run, and the knee of its loss curve, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isclose, isfinite, log
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RunError, UsageError
from paceline.utils.validation import check_range

LEAST_UPDATES = 10
SMOOTHING = 0.02
RISE = 0.2

Array = NDArray[Any]


@dataclass(frozen=True)
class Range:
    """Learning rates of one range-test run, one per update, in a geometric sequence.

    rate(u) = lowest (highest / lowest)^((u - 1) / (updates - 1)) for the updates u = 1, 2, ...

    Args:
        lowest: rate of the first update, > 0.
        highest: rate of the last update, > lowest.
        updates: number of updates, >= 10.

    Raises:
        UsageError: an argument is out of its range.

    Example:
        >>> [round(rate, 3) for rate in Range(0.001, 1.0, 10).rates[::3]]
        [0.001, 0.01, 0.1, 1.0]

    Source: Smith, "Cyclical learning rates for training neural networks", WACV 2017, Sect. 3.3.
    Differs: the rates of the paper grow linearly; a constant factor gives small rates as many updates as large ones.
    """

    lowest: float
    highest: float
    updates: int

    def __post_init__(self) -> None:
        check_range("(0, inf)", lowest=self.lowest, highest=self.highest)
        check_range(f"[{LEAST_UPDATES}, inf)", Integral, updates=self.updates)
        if self.lowest >= self.highest:
            raise UsageError(
                f"lowest={self.lowest!r} and highest={self.highest!r}; expected rising rates, "
                "for example lowest=0.001, highest=1"
            )

    def rate(self, update: int) -> float:
        """Return the rate of an update, counted from 1; it is constant after the last one."""
        done = min(1.0, (update - 1) / (self.updates - 1))
        return self.lowest * exp(done * log(self.highest / self.lowest))

    @property
    def rates(self) -> list[float]:
        """Rates of all updates, lowest first."""
        return [self.rate(update) for update in range(1, self.updates + 1)]


@dataclass(frozen=True)
class KneePoint:
    """Knee of a loss curve.

    Attributes:
        learning_rate: learning rate at the knee.
        is_bound: whether the curve never rises, so that the knee may lie higher.
    """

    learning_rate: float
    is_bound: bool


def averaged(runs: Sequence[Sequence[float]], points: int) -> list[float]:
    """Return the mean loss curve of several runs of one range.

    A loss above the initial loss, one that is not finite, and one that is missing because the run ended early all count
    as the initial loss.

    Args:
        runs: losses of each run: the initial loss, which is finite, and the loss after each update.
        points: number of updates in the range, >= 1.

    Returns:
        The mean initial loss, and the mean loss after each update.

    Example:
        >>> averaged([[2.0, 1.0, 9.0, 2.5], [2.0, 1.5]], points=3)
        [2.0, 1.25, 2.0, 2.0]
    """
    begin = sum(losses[0] for losses in runs) / len(runs)
    curves = np.full((len(runs), points + 1), begin)
    for curve, losses in zip(curves, runs, strict=True):
        known = [min(loss, begin) if isfinite(loss) else begin for loss in losses[1 : points + 1]]
        curve[1 : 1 + len(known)] = known
    return [float(loss) for loss in curves.mean(axis=0)]


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the losses smoothed by a Gaussian window with a standard deviation of 2 % of their number, at least 1.

    >>> smoothed([1.0, 1.0, 1.0])
    [1.0, 1.0, 1.0]
    """
    place = np.arange(len(losses))
    width = max(1.0, SMOOTHING * len(losses))
    weights: Array = np.exp(-0.5 * ((place[:, None] - place) / width) ** 2)
    return [float(loss) for loss in weights @ np.asarray(losses) / weights.sum(axis=1)]


def find_knee(rates: Sequence[float], losses: Sequence[float]) -> KneePoint:
    """Return the knee of a loss curve: the rate at which the loss turns from falling to rising.

    The knee is the rate of the lowest loss before the first rise by more than RISE of the whole fall. The whole fall is
    the initial loss minus the lowest one. Smaller rises are noise. The curve after that rise is ignored, because a
    network far from its minimum may learn again at a rate that has no meaning.

    Args:
        rates: rising learning rates, > 0.
        losses: smoothed losses: the initial loss, then the loss after the update at each rate.

    Raises:
        RunError: the loss never fell.

    Example:
        >>> find_knee([0.1, 0.2, 0.4, 0.8], [2.0, 1.5, 1.0, 1.9, 0.9])
        KneePoint(learning_rate=0.2, is_bound=False)

    Source: Smith 2017, Sect. 3.3: the rate at which accuracy "slows, becomes ragged, or starts to fall". The knee rule
    of DBW is "the inflection points of a specific curve"; the paper does not name the curve.

    Reason for this definition: on MNIST with DBW's network (k_sync, n = 16, rates from 0.001 to 1), the steepest
    descent lies near 0.03 for every k at B = 16. So it depends on the growth of the rate, not on the noise. The ends of
    the lowest tenth of the curve do not grow with k either. The turning point does:

    | B, updates, runs | k = 1 | 2 | 4 | 6 | 8 | 16 |
    | --- | --- | --- | --- | --- | --- | --- |
    | 16, 400, 2 | 0.090 | 0.092 | 0.141 | 0.139 | 0.250 | 0.255 |
    | 128, 200, 3 (k = 16: 2) | 0.241 | | 0.249 | | | 0.329 |
    | 500, 100, 2 (k = 1: 3) | 0.285 | | 0.175 | | | 0.107 |

    DBW reports 0.08 for B = 500, k = 16, and a factor below 5 between k = 1 and 16 for B = 16. Training with constant
    rates agrees: at B = 16, k = 1, 0.09 reaches a lower loss in 400 updates than 0.045 and 0.18; at B = 16, k = 16, 0.3
    still trains, but starts slower than 0.15; at B = 500, k = 16, the loss jumps at 0.16. A single run may be off by a
    factor of 2 (more at B = 500, k = 1). 100 updates are too few for the noise of a small k to have an effect: all k
    have nearly the same knee at B = 16, and at B = 500 the knee falls with k. Give 400 or more.
    """
    begin, *after = losses
    lowest = min(after)
    if lowest > begin or isclose(lowest, begin, rel_tol=1e-9):
        raise RunError(
            f"the loss never fell below its initial value {begin:.3g} at rates from {rates[0]:g} to {rates[-1]:g}; "
            "give a smaller lowest rate, or more updates"
        )
    turn = 0
    for place, loss in enumerate(after):
        if loss < after[turn]:
            turn = place
        elif loss - after[turn] > RISE * (begin - lowest):
            return KneePoint(rates[turn], is_bound=False)
    return KneePoint(rates[turn], is_bound=True)
