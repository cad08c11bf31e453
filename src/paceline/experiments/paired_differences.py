"""Paired differences between each protocol and the first one of a comparison, with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import NamedTuple

from paceline.core.stop import Stop
from paceline.experiments.comparison_row import ComparisonRow
from paceline.recording.run_stats import RunStats
from paceline.utils.confidence_intervals import Interval, paired_difference, paired_ratio
from paceline.utils.wording import counted


class PairedDifference(NamedTuple):
    """Difference of one number between a protocol and the first one.

    Attributes:
        name: name of the number, for example "speed-up" or "training loss".
        interval: 95 % confidence interval of the ratio of times, or of the difference of other numbers.
        is_ratio: whether the interval is that of a ratio.
    """

    name: str
    interval: Interval
    is_ratio: bool

    @property
    def is_seen(self) -> bool:
        """Whether the interval excludes no difference."""
        return not self.interval.contains(1.0 if self.is_ratio else 0.0)

    def __str__(self) -> str:
        sign = "" if self.is_ratio else "+"
        ends = f"{self.interval.low:{sign}.3g} to {self.interval.high:{sign}.3g}"
        return f"{self.name} {ends}" if self.is_seen else f"{self.name}: no significant difference ({ends})"


def differences(first: ComparisonRow, row: ComparisonRow, stop: Stop) -> list[PairedDifference]:
    """Return the differences between two protocols, for numbers that both have for two seeds or more.

    Times are compared only if both protocols reached the target at every seed, because otherwise the slow runs would be
    missing. Losses and metrics are compared at the end of the runs.

    Source: Student's t on paired differences, of logarithms for times.
    """
    found = []
    if first.always_reaches(stop) and row.always_reaches(stop):
        times = (first.numbers(lambda stats: stats.time_s), row.numbers(lambda stats: stats.time_s))
        found.append(("speed-up", paired_ratio(*times), True))
    ends = [(first.numbers(lambda stats: stats.loss), row.numbers(lambda stats: stats.loss), "training loss")]
    shared = sorted(_metrics(first) & _metrics(row))
    ends += [(first.numbers(_metric(name)), row.numbers(_metric(name)), f"test {name}") for name in shared]
    found += [(name, paired_difference(_known(ours), _known(theirs)), False) for ours, theirs, name in ends]
    return [PairedDifference(name, interval, is_ratio) for name, interval, is_ratio in found if interval is not None]


def difference_sentence(first: ComparisonRow, row: ComparisonRow, stop: Stop) -> str:
    """Return a sentence on the differences of a protocol from the first one; empty if none is known."""
    found = differences(first, row, stop)
    if not found:
        return ""
    pairs = counted(min(each.interval.pairs for each in found), "paired seed")
    return f"{row.protocol} against {first.protocol}, 95 % intervals over {pairs}: {'; '.join(map(str, found))}."


def _metric(name: str) -> Callable[[RunStats], float]:
    return lambda stats: stats.metrics[name]


def _metrics(row: ComparisonRow) -> set[str]:
    """Return the names of the metrics that every run of a row has."""
    names = [set(stats.metrics) for stats in row.runs.values()]
    return set.intersection(*names) if names else set()


def _known(values: Mapping[int, float]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if isfinite(value)}
