"""How long n workers that begin together, and begin again whenever they are done, take for k gradients."""

import numpy as np
from numpy.typing import NDArray

from paceline.timing import Law

Array = NDArray[np.float64]

POINTS = 4096
TAIL = 1e-9
BISECTIONS = 36
MOST = 256
"""Gradients for which the table of POINTS by k is still quick to compute."""


def time_of_gradients(law: Law, k: int, n: int) -> tuple[float, float]:
    """Return a lower and an upper bound on the expected time of the k-th gradient, in seconds, close together.

    ``E[T] = integral over t >= 0 of P(N_1(t) + ... + N_n(t) < k) dt``, N_i(t) the gradients of worker i until t.

    The bounds are exact for times rounded down and up to a grid; the times in between have an error of second order
    in their mean. Rounding of the sums, and the probability of 1e-9 beyond the grid, are neglected.

    Args:
        law: of the time of each gradient, with a mean.
        k: gradients, 1 to MOST.
        n: workers, >= 1.

    Source: own, from renewal theory; Dutta et al., AISTATS 2018, Sect. 4.1 calls it not tractable in general.
    """
    end_s = (1 + k / n) * law.expectation_s
    while True:
        t, step_s = np.linspace(0, end_s, POINTS, retstep=True)
        cdf = _distribution(law, t)
        late = _fewer_than(k, n, cdf)
        if late[-1] < TAIL:
            early = _fewer_than(k, n, np.append(cdf[1:], cdf[-1]))
            return float(step_s * early.sum()), float(step_s * late.sum())
        end_s *= 2


def _distribution(law: Law, t: Array) -> Array:
    """Return P(time <= t): the largest u whose quantile is not above t."""
    low, high = np.zeros_like(t), np.ones_like(t)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_below = law.quantile(middle) <= t
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return low


def _fewer_than(k: int, n: int, cdf: Array) -> Array:
    """Return the probability that n workers have brought fewer than k gradients, at each point of the grid.

    Args:
        k: gradients.
        n: workers.
        cdf: of a time on the grid, [POINTS].
    """
    one = _counts(k, cdf)
    all_workers = None
    while n:  # the n-th power, by squaring
        if n % 2:
            all_workers = one if all_workers is None else _sum_of(all_workers, one)
        one, n = _sum_of(one, one), n // 2
    assert all_workers is not None
    return np.asarray(all_workers.sum(axis=1)).clip(0, 1)


def _counts(k: int, cdf: Array) -> Array:
    """Return the probability of 0, 1, ..., k-1 gradients of one worker until each point, [POINTS, k]."""
    length = 2 * len(cdf)
    one = np.fft.rfft(np.diff(cdf, prepend=0), length)
    counts = np.empty((len(cdf), k))
    sums, at_least = np.zeros(len(cdf)), np.ones(len(cdf))
    sums[0] = 1
    for m in range(k):
        sums = np.fft.irfft(np.fft.rfft(sums, length) * one, length)[: len(cdf)]
        more = np.cumsum(sums)
        counts[:, m] = at_least - more
        at_least = more
    return counts


def _sum_of(left: Array, right: Array) -> Array:
    """Return the probabilities of the sum of two independent counts, as far as it is below k."""
    k = left.shape[1]
    product = np.fft.rfft(left, 2 * k) * np.fft.rfft(right, 2 * k)
    return np.asarray(np.fft.irfft(product, 2 * k)[:, :k])
