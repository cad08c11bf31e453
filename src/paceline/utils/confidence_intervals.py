"""Confidence intervals of means, paired differences and paired ratios, by Student's t distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, isfinite, log, sqrt
from statistics import mean, stdev
from typing import NamedTuple

LEVEL = 0.95


class Interval(NamedTuple):
    """Confidence interval.

    Attributes:
        estimate: mean, difference or ratio.
        low: lower end.
        high: upper end.
        pairs: number of values or pairs, >= 2.
    """

    estimate: float
    low: float
    high: float
    pairs: int

    def contains(self, value: float) -> bool:
        """Return whether a value lies in the interval, its ends included."""
        return self.low <= value <= self.high


def interval_of_mean(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Return the confidence interval of the mean of independent values, for example over seeds.

    ``mean +- t(level, n - 1) * s / sqrt(n)``

    Args:
        values: n independent values.
        level: probability that the interval covers the true mean if the values are normal, in (0, 1).

    Returns:
        The interval, or None for fewer than two values or for one that is not finite.

    >>> low_high = interval_of_mean([1.0, 2.0, 3.0])
    >>> [round(value, 3) for value in low_high]
    [2.0, -0.484, 4.484, 3]
    """
    from scipy.special import stdtrit  # imported here because scipy is slow to import

    n = len(values)
    if n < 2 or not all(map(isfinite, values)):
        return None
    half = float(stdtrit(n - 1, (1 + level) / 2)) * stdev(values) / sqrt(n)
    return Interval(estimate=mean(values), low=mean(values) - half, high=mean(values) + half, pairs=n)


def paired_difference(first: Mapping[int, float], second: Mapping[int, float], level: float = LEVEL) -> Interval | None:
    """Return the interval of ``second - first``, paired by seed.

    Args:
        first: values by seed; only the seeds of both are used.
        second: values by seed.
        level: probability that the interval covers the true value, in (0, 1).

    >>> paired_difference({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.5, 7: 9.0})
    Interval(estimate=0.5, low=0.5, high=0.5, pairs=2)
    """
    return interval_of_mean([second[seed] - first[seed] for seed in sorted(first.keys() & second.keys())], level)


def paired_ratio(first: Mapping[int, float], second: Mapping[int, float], level: float = LEVEL) -> Interval | None:
    """Return the interval of ``first / second``, paired by seed, for example the speed-up of times.

    It is computed from differences of logarithms, so the estimate is the geometric mean of the ratios.

    Args:
        first: values by seed, > 0; only the seeds of both are used.
        second: values by seed, > 0.
        level: probability that the interval covers the true value, in (0, 1).

    Returns:
        The interval, or None for fewer than two pairs or for a value that is not positive and finite.

    >>> paired_ratio({0: 2.0, 1: 6.0}, {0: 1.0, 1: 3.0}).estimate
    2.0
    """
    seeds = sorted(first.keys() & second.keys())
    if not all(isfinite(value) and value > 0 for seed in seeds for value in (first[seed], second[seed])):
        return None
    logs = interval_of_mean([log(first[seed] / second[seed]) for seed in seeds], level)
    return logs and Interval(estimate=exp(logs.estimate), low=exp(logs.low), high=exp(logs.high), pairs=logs.pairs)
