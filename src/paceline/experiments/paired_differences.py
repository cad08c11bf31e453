"""Each protocol against the first one of a comparison: intervals of the differences, paired by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from paceline.utils.confidence_intervals import Interval, paired_difference, paired_ratio
from paceline.utils.wording import counted

if TYPE_CHECKING:
    from paceline.core.stop import Stop
    from paceline.experiments.comparison import ComparisonRow
    from paceline.recording.run_stats import RunStats


class PairedDifference(NamedTuple):
    """One number of a protocol against that of the first one.

    Attributes:
        name: of the number, as "speed-up" or "training loss".
        interval: 95 % confidence interval of the ratio of times, or of the difference of anything else.
        is_ratio: whether it is a ratio.
    """

    name: str
    interval: Interval
    is_ratio: bool

    @property
    def is_seen(self) -> bool:
        """Whether the interval excludes that there is no difference."""
        return not self.interval.contains(1.0 if self.is_ratio else 0.0)

    def __str__(self) -> str:
        sign = "" if self.is_ratio else "+"
        ends = f"{self.interval.low:{sign}.3g} to {self.interval.high:{sign}.3g}"
        return f"{self.name} {ends}" if self.is_seen else f"{self.name}: no difference to see ({ends})"


def differences(first: ComparisonRow, row: ComparisonRow, stop: Stop) -> list[PairedDifference]:
    """Return the differences between two protocols, of numbers that both have for two seeds or more.

    Times are compared over the seeds at which both reached the target, and only if both reached it at every seed:
    otherwise the slow runs would be left out. Losses and metrics are compared at the end of the runs.

    Source: Student's t on paired differences, of logarithms for times.
    """
    found = []
    if first.always_reaches(stop) and row.always_reaches(stop):
        times = (first.numbers(lambda figures: figures.time_s), row.numbers(lambda figures: figures.time_s))
        found.append(("speed-up", paired_ratio(*times), True))
    ends = [(first.numbers(lambda figures: figures.loss), row.numbers(lambda figures: figures.loss), "training loss")]
    shared = sorted(_metrics(first) & _metrics(row))
    ends += [(first.numbers(_metric(name)), row.numbers(_metric(name)), f"test {name}") for name in shared]
    found += [(name, paired_difference(_known(ours), _known(theirs)), False) for ours, theirs, name in ends]
    return [PairedDifference(name, interval, is_ratio) for name, interval, is_ratio in found if interval is not None]


def in_words(first: ComparisonRow, row: ComparisonRow, stop: Stop) -> str:
    """Return the differences of a protocol from the first one in a sentence, nothing if none is known."""
    found = differences(first, row, stop)
    if not found:
        return ""
    pairs = counted(min(each.interval.pairs for each in found), "paired seed")
    told = "; ".join(map(str, found))
    return f"{row.protocol} against {first.protocol}, 95 % intervals over {pairs}: {told}."


def _metric(name: str) -> Callable[[RunStats], float]:
    return lambda figures: figures.metrics[name]


def _metrics(row: ComparisonRow) -> set[str]:
    """Return the metrics that every run of a row has."""
    names = [set(figures.metrics) for figures in row.runs.values()]
    return set.intersection(*names) if names else set()


def _known(values: Mapping[int, float]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if isfinite(value)}
