"""Survival function of a distribution: the probability that a task takes longer than a given time."""

from math import log

import numpy as np

from paceline.clusters.timing import distributions as timing
from paceline.clusters.timing.distributions import Array
from paceline.theory.assumptions import RoundTripDistribution

BISECTIONS = 60  # leave less than the rounding of an exponent
LARGEST_EXPONENT = 53 * log(2)  # of 1 - u, the smallest tail that the argument of a quantile function can express


def survival(distribution: timing.Distribution, t: Array) -> Array:
    """Return ``P(X > t)`` for each t, with a small relative error also in the tail.

    The distributions of `paceline.clusters.timing` have closed forms. For any other the quantile function is inverted,
    and a tail below 2**-53, which the argument of a quantile function cannot express, counts as 0.

    Args:
        distribution: distribution of X.
        t: times in seconds, >= 0.

    >>> survival(timing.Exponential(mean_s=2.0), np.array([0.0, 2.0]))
    array([1.        , 0.36787944])
    """
    match distribution:
        case timing.Deterministic(value_s):
            return np.where(t < value_s, 1.0, 0.0)
        case timing.Uniform(low_s, high_s):
            return np.asarray((high_s - t) / (high_s - low_s)).clip(0, 1)
        case timing.Exponential(mean_s):
            return np.asarray(np.exp(-t / mean_s))
        case timing.ShiftedExponential(shift_s, mean_s):
            return np.asarray(np.exp(-np.maximum(t - shift_s, 0) / mean_s))
        case timing.Pareto(scale_s, shape):
            return np.asarray(np.maximum(t / scale_s, 1) ** -shape)
        case timing.HyperExponential(means_s, probabilities):
            return np.asarray(np.exp(-t[..., None] / np.array(means_s)) @ np.array(probabilities))
        case timing.Empirical(values_s):
            return 1 - np.searchsorted(np.array(values_s), t, side="right") / len(values_s)
        case RoundTripDistribution(compute, speed, network_s):
            return np.where(t < network_s, 1.0, survival(compute, np.maximum(t - network_s, 0) * speed))
        case timing.LogNormal() | timing.Gamma():
            return _special(distribution, t)
    return _inverted(distribution, t)


def _special(distribution: timing.LogNormal | timing.Gamma, t: Array) -> Array:
    from scipy.special import gammaincc, ndtr  # here, because it is slow to import

    if isinstance(distribution, timing.Gamma):
        return np.asarray(gammaincc(distribution.shape, t * distribution.shape / distribution.mean_s))
    with np.errstate(divide="ignore"):  # at t = 0 the logarithm is -inf, and the result 1 is right
        return np.asarray(ndtr(-np.log(t / distribution.median_s) / distribution.sigma))


def _inverted(distribution: timing.Distribution, t: Array) -> Array:
    """Return ``P(X > t) = exp(-x)`` by bisection: x is the largest exponent whose quantile is not above t."""
    low, high = np.zeros_like(t), np.full_like(t, LARGEST_EXPONENT)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_below = distribution.quantile(-np.expm1(-middle)) <= t
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    least_s, most_s = distribution.quantile(np.array([0.0, -np.expm1(-LARGEST_EXPONENT)]))
    return np.select([t < least_s, t >= most_s], [1.0, 0.0], np.exp(-low))
