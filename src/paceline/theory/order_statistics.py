"""Expected order statistics: the k-th smallest of n independent times of one distribution."""

from math import isinf, log
from numbers import Integral
from typing import Any

import numpy as np

from paceline.clusters.timing import distributions as timing
from paceline.errors import UsageError
from paceline.theory.assumptions import RoundTripDistribution
from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range

NEGLIGIBLE = 45.0  # exp(-45) times the peak of the weight is below the rounding of the sum
POINTS = 2049
ALMOST_ONE = 1 - 2.0**-53  # the largest argument of a quantile function, which is for u in [0, 1)


@checked_types
def order_statistic(distribution: timing.Distribution, k: int, n: int) -> float:
    """Return the expected k-th smallest of n independent times of a distribution, in seconds.

    ``E[X_{k:n}] = integral from 0 to 1 of quantile(u) * u**(k-1) * (1-u)**(n-k) du / B(k, n-k+1)``

    `Deterministic`, `Uniform`, `Exponential`, `ShiftedExponential`, `Pareto` and `Empirical` have closed forms. Other
    distributions use quadrature of the quantile function.

    Args:
        distribution: distribution of each time.
        k: rank, from 1 (the smallest) to n (the largest).
        n: number of times, >= 1.

    Raises:
        UsageError: the expectation is infinite, or k or n is out of range.

    >>> order_statistic(timing.Exponential(mean_s=1.0), k=2, n=2)
    1.5
    >>> order_statistic(timing.Pareto(scale_s=1.0, shape=1.0), k=1, n=3)
    1.5

    Source: Dutta et al., AISTATS 2018, supplement 7.1 (exponential); David and Nagaraja, "Order Statistics", 2003.
    """
    check_range("[1, inf)", Integral, n=n)
    check_range(f"[1, {n}]", Integral, k=k)
    match distribution:
        case timing.Deterministic(value_s):
            return value_s
        case timing.Uniform(low_s, high_s):
            return low_s + (high_s - low_s) * k / (n + 1)
        case timing.Exponential(mean_s):
            return mean_s * harmonic(k, n)
        case timing.ShiftedExponential(shift_s, mean_s):
            return shift_s + mean_s * harmonic(k, n)
        case timing.Pareto():
            return _pareto(distribution, k, n)
        case timing.Empirical():
            return _empirical(distribution, k, n)
        case RoundTripDistribution(compute, speed, network_s):
            return order_statistic(compute, k, n) / speed + network_s
    return _quadrature(distribution, k, n)


@checked_types
def harmonic(k: int, n: int) -> float:
    """Return the sum of 1/i for i from n-k+1 to n: the expected k-th smallest of n exponentials of mean 1.

    Args:
        k: rank K, from 1 to n.
        n: number of workers, >= 1.

    >>> harmonic(k=2, n=2)
    1.5
    """
    return float((1 / np.arange(n - k + 1, n + 1)).sum())


@checked_types
def log_harmonic(k: int, n: int) -> float:
    """Return the paper's approximation of `harmonic`: ``log(n / (n - k))``, and ``log(n)`` for k = n.

    It is too low: by 23 % for k = n = 8, and by Euler's constant, 0.577, for any large k = n.

    Args:
        k: rank K, from 1 to n.
        n: number of workers, >= 1.

    >>> round(log_harmonic(8, 8) / harmonic(8, 8) - 1, 3)
    -0.235

    Source: Dutta et al., AISTATS 2018, Sect. 4.1 (comment on Lemma 3) and Corollary 1.
    """
    return log(n / (n - k)) if k < n else log(n)


def _pareto(distribution: timing.Pareto, k: int, n: int) -> float:
    """Return the ratio of gamma functions ``G(n+1) G(n-k+1-1/a) / (G(n-k+1) G(n+1-1/a))`` as a telescoping product."""
    if distribution.shape * (n - k + 1) <= 1:
        raise UsageError(
            f"order statistic {k} of {n} times of {distribution} has an infinite mean, because the shape is not above "
            f"1 / (n - k + 1) = {1 / (n - k + 1):.4g}; give a larger shape or a smaller k"
        )
    i = np.arange(n - k + 1, n + 1)
    return distribution.scale_s * float(np.exp(-np.log1p(-1 / (distribution.shape * i)).sum()))


def _empirical(distribution: timing.Empirical, k: int, n: int) -> float:
    """Return the mean of the values, weighted by the probability that each is the k-th smallest of n."""
    from scipy.special import betainc  # here, because it is slow to import

    edges = np.linspace(0, 1, len(distribution.values_s) + 1)
    return float(np.diff(betainc(k, n - k + 1, edges)) @ np.array(distribution.values_s))


def _quadrature(distribution: timing.Distribution, k: int, n: int) -> float:
    """Integrate over s = log(u / (1-u)) by the trapezoidal rule, which converges exponentially here.

    The weight ``u**k * (1-u)**(n-k+1)`` is log-concave with exponential tails. So a narrow window is enough for any n,
    also if the quantile function ends at 0 or inf.
    """
    if isinf(distribution.expectation_s):
        raise UsageError(
            f"{distribution} has an infinite mean, so its order statistics may be infinite; give one with a mean"
        )
    peak = log(k / (n - k + 1))
    s = np.linspace(_edge(k, n, peak, direction=-1), _edge(k, n, peak, direction=1), POINTS)
    log_weight = _log_weight(s, k, n)
    weight = np.exp(log_weight - log_weight.max())
    u = np.minimum(1 / (1 + np.exp(-s)), ALMOST_ONE)
    return float(weight @ distribution.quantile(u) / weight.sum())


def _edge(k: int, n: int, peak: float, direction: int) -> float:
    """Return a point on one side of the peak beyond which the weight is negligible."""
    width: float = n**-0.5
    least = _log_weight(peak, k, n) - NEGLIGIBLE
    while _log_weight(peak + direction * width, k, n) > least:
        width *= 1.25
    return peak + direction * width


def _log_weight(s: Any, k: int, n: int) -> Any:
    return -k * np.logaddexp(0, -s) - (n - k + 1) * np.logaddexp(0, s)
