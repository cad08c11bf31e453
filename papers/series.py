"""Runs of a figure by series and seed, and their text in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from paceline.utils.confidence_intervals import interval_of_mean
from papers.store import Line

Runs = Mapping[int, Line]  # by seed
SPREAD = "mean +- 95 % interval (min to max)"
"""Head of a column of values that `spread` formats."""


def series_of(lines: Sequence[Line]) -> dict[str, dict[int, Line]]:
    """Return the runs of each series, by seed."""
    by_series: dict[str, dict[int, Line]] = {}
    for line in lines:
        by_series.setdefault(line["asked"]["series"], {})[line["asked"]["seed"]] = line
    return by_series


def spread(values: Sequence[float], digits: int) -> str:
    """Return the mean with its 95 % interval, and the smallest and the largest value, as text.

    The interval is Student's t, ``mean +- t_{0.975, n-1} s / sqrt(n)``. The smallest and the largest of n seeds are no
    interval: one more seed lies outside them with probability 2 / (n + 1), which is one third for five seeds.

    >>> spread([54.0, 56.0, 61.0], 1), spread([38.4], 1)
    ('57.0 +- 9.0 (54.0 to 61.0)', '38.4 (one seed)')
    """
    if not values:
        return "-"
    interval = interval_of_mean(values)
    half = f" +- {interval.high - interval.estimate:.{digits}f}" if interval is not None else ""
    span = f"{min(values):.{digits}f} to {max(values):.{digits}f}" if len(values) > 1 else "one seed"
    return f"{mean(values):.{digits}f}{half} ({span})"
