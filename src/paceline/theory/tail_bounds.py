"""Tail bounds: the part of the expected time of k gradients beyond a large time."""

from math import exp, inf, lgamma, log

import numpy as np

from paceline.clusters.timing.distributions import Distribution, Pareto
from paceline.theory.assumptions import RoundTripDistribution
from paceline.theory.survival_function import survival

LARGEST_EXPONENT = 700.0  # exp() of more overflows
SHARES = np.logspace(-1, -6, 11)  # of the time: bounds on all but the longest task


def beyond(
    distribution: Distribution, k: int, n: int, t: float, fewer: float, fewer_without_one: float
) -> tuple[float, float]:
    """Return a lower and an upper bound on ``E[(T - t)+]``, T the time of the k-th gradient of n workers, in seconds.

    With a finite mean: ``E[(T - t)+] <= k E[X] (P(T > t) + P(the other n - 1 workers have fewer than k))``. After t,
    worker 1 alone is enough. It takes the rest of its current task, which is one of its first k and independent of the
    other workers, and fewer than k new tasks.

    Pareto, with or without a mean: in the tail each worker is in one long task, after m_i short ones with
    ``m_1 + ... + m_n < k``, so that P(T > t) tends to ``binomial(n + k - 1, n) P(X > t)**n``.

    Args:
        distribution: distribution of the time X of each gradient; one with an infinite mean must be Pareto.
        k: number of gradients, >= 1.
        n: number of workers, >= 2.
        t: time in seconds, > 0.
        fewer: upper bound on P(T > t).
        fewer_without_one: upper bound on P(T > t) for n - 1 workers.
    """
    of_mean = k * distribution.expectation_s * (fewer + fewer_without_one) if fewer else 0.0
    match distribution:
        case Pareto(_, shape):
            lower_s, upper_s = _beyond_heavy(distribution=distribution, k=k, n=n, t=t, shape=shape, network_s=0.0)
        case RoundTripDistribution(Pareto(_, shape), _, network_s):
            lower_s, upper_s = _beyond_heavy(distribution=distribution, k=k, n=n, t=t, shape=shape, network_s=network_s)
        case _:
            return 0.0, of_mean
    return lower_s, min(of_mean, upper_s)


def _beyond_heavy(
    distribution: Distribution, k: int, n: int, t: float, shape: float, network_s: float
) -> tuple[float, float]:
    """Return bounds on the integral: ``binomial(n + k - 1, n) P(X > x)**n`` times a ratio that tends to 1 as t grows.

    The ratio is that of P(S_m > t) to m P(X > t), m <= k. Either the longest task takes t minus a share of t, or it
    takes at least t / k and another task takes at least that share over k.
    """
    tail = float(survival(distribution, np.array(t)))
    one_long = survival(distribution, (1 - SHARES) * t)
    two_long = (k - 1) * float(survival(distribution, np.array(t / k))) * survival(distribution, SHARES * t / k)
    ratio = float(np.min(one_long + two_long)) / tail
    integral = log((t - network_s) / (shape * n - 1)) + lgamma(n + k) - lgamma(n + 1) - lgamma(k) + n * log(tail)
    all_short = 1 - k * tail * ratio  # lower bound on P(S_m <= t)
    return _exp(integral + n * log(all_short)) if all_short > 0 else 0.0, _exp(integral + n * log(ratio))


def _exp(exponent: float) -> float:
    return exp(exponent) if exponent < LARGEST_EXPONENT else inf
