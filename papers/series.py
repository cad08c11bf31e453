"""The runs of a figure by series and seed, and how they are written in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from papers.store import Line

Runs = Mapping[int, Line]  # by seed


def series_of(lines: Sequence[Line]) -> dict[str, dict[int, Line]]:
    """Return the runs of each series, by seed."""
    by_series: dict[str, dict[int, Line]] = {}
    for line in lines:
        by_series.setdefault(line["asked"]["series"], {})[line["asked"]["seed"]] = line
    return by_series


def spread(values: Sequence[float], digits: int) -> str:
    """Return the mean with the smallest and the largest."""
    if not values:
        return "-"
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
