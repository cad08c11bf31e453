"""Renewal theory: the expected time of the k-th gradient of n workers that start together and never pause."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.clusters.timing.distributions import Distribution
from paceline.theory.order_statistics import order_statistic
from paceline.theory.survival_function import survival
from paceline.theory.tail_bounds import beyond

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Bracket = tuple[float, float]

WIDTH = 0.008
"""Width of the bracket at which refinement stops, as a share of its lower end."""
ENDS = 0.0005
"""Largest share of the integral that the bounds before the first and beyond the last octave cover."""
FEWEST_POINTS, MOST_POINTS = 256, 2**17
BLOCKS = 512  # largest number of blocks per octave; the probability is constant in each
NEGLIGIBLE = 1e-13
LARGEST_S = 1e300  # the octave after it still ends below the largest float
SMALLEST = 1e-300  # scale where all probabilities are 0, so that nothing is divided by 0
MOST = 256
"""Largest number of gradients for which all counts are quick to compute."""


def time_of_gradients(distribution: Distribution, k: int, n: int) -> Bracket:
    """Return a lower and an upper bound on the expected time T of the k-th gradient, in seconds.

    ``E[T] = integral over t >= 0 of P(N_1(t) + ... + N_n(t) < k) dt``, N_i(t) the gradients of worker i until t.

    The integral is split into octaves, each with its own grid, so that the times may span many decades. In each octave
    all times are rounded down to its grid for the lower bound and up for the upper one; N_i is monotone in them. The
    octave with the widest bracket is refined until the total is narrow. E[T] is finite if and only if E[X_{1:n}] is,
    because ``P(X > t)**n <= P(T > t) <= (k P(X > t / k))**n``.

    Args:
        distribution: distribution of the time X of each gradient.
        k: number of gradients, >= 1.
        n: number of workers, >= 2.

    Raises:
        UsageError: E[X_{1:n}] is infinite, or not known to be finite.

    >>> from paceline.clusters.timing.distributions import Pareto
    >>> lower_s, upper_s = time_of_gradients(Pareto(scale_s=1.0, shape=0.8), k=4, n=8)
    >>> round(lower_s, 2), round(upper_s, 2)
    (2.19, 2.21)

    Source: paceline, from renewal theory; Dutta et al., AISTATS 2018, Sect. 4.1 calls it not tractable in general.
    """
    points = max(FEWEST_POINTS, 2 ** ceil(log2(4 * k)))  # each of k rounded-up times takes a step or more
    octaves = [_octave(distribution, k, n, 2.0 ** ceil(log2(order_statistic(distribution, 1, n))), points)]
    while _width(octaves[-1].beyond) > ENDS * _total(octaves)[0] and octaves[-1].end_s < LARGEST_S:
        octaves.append(_octave(distribution, k, n, octaves[-1].end_s * 2, points))
    while _width(octaves[0].before) > ENDS * _total(octaves)[0]:
        octaves.insert(0, _octave(distribution, k, n, octaves[0].end_s / 2, points))
    while True:
        lower_s, upper_s = _total(octaves)
        i = max(range(len(octaves)), key=lambda each: _width(octaves[each].within))
        if upper_s - lower_s <= WIDTH * lower_s or octaves[i].points >= MOST_POINTS:
            return lower_s, upper_s
        finer = 4 if upper_s - lower_s > 4 * WIDTH * lower_s else 2
        octaves[i] = _octave(distribution, k, n, octaves[i].end_s, octaves[i].points * finer)


@dataclass(frozen=True, kw_only=True)
class _Octave:
    """One octave, from half of its end to its end, with brackets of integrals of P(T > t).

    Args:
        end_s: end in seconds, > 0.
        points: number of grid points from 0 to the end.
        before: bracket of the integral from 0 to half of the end.
        within: bracket of the integral over the octave.
        beyond: bracket of the integral from the end on.
    """

    end_s: float
    points: int
    before: Bracket
    within: Bracket
    beyond: Bracket


def _octave(distribution: Distribution, k: int, n: int, end_s: float, points: int) -> _Octave:
    step_s = end_s / points
    block = max(1, points // 2 // BLOCKS)
    first = np.arange(points // 2, points, block)
    longer = survival(distribution, np.arange(points + 1, dtype=np.float64) * step_s)
    down, up = _counts(longer, k, first + block - 1, np.append(first, points - 1))
    early, late = _fewer_than(k, n, down), _fewer_than(k, n, up)
    within = float(early.sum()) * block * step_s, float(late[:-1].sum()) * block * step_s
    without_one = float(_fewer_than(k, n - 1, up[-1:])[0])
    before = float(early[0]) * end_s / 2, end_s / 2
    return _Octave(
        end_s=end_s,
        points=points,
        before=before,
        within=within,
        beyond=beyond(
            distribution=distribution, k=k, n=n, t=end_s, fewer=float(late[-1]), fewer_without_one=without_one
        ),
    )


def _total(octaves: list[_Octave]) -> Bracket:
    brackets = [octaves[0].before, *(octave.within for octave in octaves), octaves[-1].beyond]
    return sum(lower for lower, _ in brackets), sum(upper for _, upper in brackets)


def _width(bracket: Bracket) -> float:
    return bracket[1] - bracket[0]


def _counts(survival: Array, k: int, down_at: Indices, up_at: Indices) -> tuple[Array, Array]:
    """Return the probabilities of 0, 1, ... gradients of one worker, for times rounded down and rounded up.

    ``q_0 = P(X > .)``, ``q_{m+1} = q_m convolved with the probabilities of X``: a sum of positive terms, so that the
    relative error is small also in the tail. Rounded up, each time is one step longer, so that the m-th gradient
    arrives m steps later. Counts of k and more, and those of negligible probability, are omitted.

    Args:
        survival: survival function of X at the grid points 0, 1, ..., points.
        k: number of gradients, >= 1.
        down_at: indices of grid points, for the times rounded down.
        up_at: indices of grid points, for the times rounded up.

    Returns:
        Probabilities for both roundings, each [points, counts].
    """
    points = len(survival) - 1
    of_one = np.fft.rfft(-np.diff(survival), 2 * points)
    exactly, at_most = survival[1:], survival[1:].copy()
    down, up = [exactly[down_at]], [_later(at_most, up_at - 1)]
    while len(down) < k and 1 - at_most[-1] > NEGLIGIBLE:
        # Twice as long, so that the convolution does not wrap around; its rounding may be below 0.
        exactly = np.maximum(np.fft.irfft(np.fft.rfft(exactly, 2 * points) * of_one, 2 * points)[:points], 0)
        at_most += exactly
        down.append(exactly[down_at])
        up.append(_later(at_most, up_at - len(up) - 1))
    return np.array(down).T, np.maximum(np.diff(np.array(up).T, axis=1, prepend=0), 0)


def _later(at_most: Array, at: Indices) -> Array:
    return np.where(at < 0, 1.0, at_most[np.maximum(at, 0)])


def _fewer_than(k: int, n: int, counts: Array) -> Array:
    """Return the probability that n workers have delivered fewer than k gradients, at each grid point.

    Args:
        k: number of gradients, >= 1.
        n: number of workers, >= 1.
        counts: probability of each count of one worker [points, counts].
    """
    one, all_workers = _Scaled.of(counts), None
    while n:  # the n-th power, by squaring
        if n % 2:
            all_workers = one if all_workers is None else all_workers.plus(one, k)
        one, n = one.plus(one, k) if n > 1 else one, n // 2
    assert all_workers is not None
    return np.asarray(np.exp(all_workers.log_scale) * all_workers.share.sum(axis=1)).clip(0, 1)


class _Scaled(NamedTuple):
    """Probabilities of counts at grid points, scaled to a maximum of 1 against underflow."""

    share: Array  # [points, counts]
    log_scale: Array  # [points]

    @classmethod
    def of(cls, probabilities: Array, log_scale: float | Array = 0.0) -> _Scaled:
        largest = np.maximum(probabilities.max(axis=1), SMALLEST)
        return cls(probabilities / largest[:, None], np.log(largest) + log_scale)

    def plus(self, other: _Scaled, k: int) -> _Scaled:
        """Return the probabilities of the sum of two independent counts, for sums below k."""
        counts = self.share.shape[1] + other.share.shape[1] - 1
        product = np.fft.rfft(self.share, counts) * np.fft.rfft(other.share, counts)
        sums = np.maximum(np.fft.irfft(product, counts)[:, :k], 0)  # rounding may leave one below 0
        return _Scaled.of(sums, self.log_scale + other.log_scale)
