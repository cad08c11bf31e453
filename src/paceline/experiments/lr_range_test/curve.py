"""Learning-rate range test: the rates of a run, and the knee of its loss curve, as pure functions.

Where the curvature falls during training, as with cross-entropy, the limit rises, and the knee is the limit within
the test: less than what a long run takes. Softmax regression on digits, at 32 samples a gradient, has the limit
2 / (largest eigenvalue of the Hessian) = 1.7 at the start, 3.0 after 50 updates at the rate 3, and 10.9 after 200
at 10. With k = 16, 200 updates at one rate end with the lowest loss at 6 to 12, and still train at 56. Knees, each
the median of three times three runs:

| updates of the test | k = 1 | 4 | 16 |
| --- | --- | --- | --- |
| 100 | 1.5 | 2.2 | 2.5 |
| 400 | 2.6 | 3.7 | 3.7 |
| 1600 | 4.1 | 5.9 | 6.7 |
"""

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
RISE = 0.2  # of the whole fall, after which a curve ends
NEAR = 0.02  # of the whole fall, within which a loss counts as the lowest

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
    """Return the knee of a loss curve: the last rate before the loss rises at which it is still near its lowest.

    With the loss L_u after the update at rate u, the lowest loss so far m_u = min(L_1 ... L_u), and the whole fall
    F = L_0 - min L, the knee is the largest rate u with

        L_u <= m_u + NEAR F    before the first v with    L_v > m_v + RISE F.

    So it is near the rate at which training diverges. The rate of the lowest loss is not: where gradients have noise,
    the loss has a floor that rises slowly with the rate, s / (1 - rate / limit) for least squares, and the lowest loss
    is where the descent reaches this floor, far below the limit and almost the same for every k.

    Smaller rises are noise. The curve after the rise is ignored, because a network far from its minimum may learn again
    at a rate that has no meaning.

    Args:
        rates: rising learning rates, > 0.
        losses: smoothed losses: the initial loss, then the loss after the update at each rate.

    Raises:
        RunError: the loss never fell.

    Example:
        >>> find_knee([0.1, 0.2, 0.4, 0.8], [2.0, 1.5, 1.0, 1.9, 0.9])
        KneePoint(learning_rate=0.2, is_bound=False)

    Source: Smith 2017, Sect. 3.3: the rate at which accuracy "slows, becomes ragged, or starts to fall". The knee rule
    of DBW is "the inflection points of a specific curve"; the paper does not name the curve, and says that the rates
    increase with k. The limit of least squares: Ma, Bassily, Belkin, "The power of interpolation", ICML 2018.

    Where the limit is known: least squares with d = 20 Gaussian inputs has the limit 2 m / (m + d + 1) for m samples in
    an update. Knee by limit, at 4 samples a gradient and 400 updates, median of four times three runs:

    | noise of the labels | k = 1 | 2 | 4 | 8 | 16 | lowest loss, k = 1 and 16 |
    | --- | --- | --- | --- | --- | --- | --- |
    | 0.01 | 1.30 | 1.17 | 1.06 | 1.02 | 0.98 | 0.76, 0.19 |
    | 0.3 | 0.84 | 0.77 | 0.75 | 0.76 | 0.78 | 0.40, 0.16 |
    | 2 | 0.33 | 0.21 | 0.19 | 0.19 | 0.27 | 0.25, 0.12 |

    With hardly any noise the loss falls so far that its rise is seen late, up to 1.4 times the limit. With much noise
    it rises early. Give 400 updates or more: with 100, single losses of a small k may end the curve at its beginning.
    """
    begin, *after = losses
    lowest = min(after)
    if lowest > begin or isclose(lowest, begin, rel_tol=1e-9):
        raise RunError(
            f"the loss never fell below its initial value {begin:.3g} at rates from {rates[0]:g} to {rates[-1]:g}; "
            "give a smaller lowest rate, or more updates"
        )
    fall, knee, so_far = begin - lowest, rates[0], after[0]
    for rate, loss in zip(rates, after, strict=False):
        so_far = min(so_far, loss)
        if loss - so_far <= NEAR * fall:
            knee = rate
        elif loss - so_far > RISE * fall:
            return KneePoint(knee, is_bound=False)
    return KneePoint(knee, is_bound=True)
