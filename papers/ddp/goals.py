"""Goals for `auto` against DDP, written down before the runs, each with the comparison that is farthest from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import NamedTuple

from paceline.utils.confidence_intervals import Interval
from papers.ddp.outcomes import Outcomes, interval_text, loss_difference, speed_up, unreached
from papers.ddp.settings import AUTO, DDP, JOBS, WITHOUT_SLOW, Comparison

SLOWEST_HEALTHY = 1.10  # time of auto / time of DDP where no worker is slow
SLOWEST = 1.2  # time of auto / time of the better of DDP with and without the slow worker
FASTER, SURELY_FASTER = 1.3, 1.1  # times faster than both, and the lower end of the interval
FASTER_PATTERNS = ("rotating", "transient", "ladder")
HIGHER, SURELY_HIGHER = 0.02, 0.05  # final loss - DDP's in nats, and the upper end of the interval

NEVER = Interval(estimate=0.0, low=0.0, high=inf, pairs=0)  # times faster, of runs that have not reached the target


class Goal(NamedTuple):
    """Goal and what the runs found.

    Attributes:
        text: goal.
        measured: value with its 95 % interval, and its comparison.
        is_reached: whether the value reaches the goal.
    """

    text: str
    measured: str
    is_reached: bool


def goals(found: Mapping[Comparison, Outcomes]) -> Iterator[Goal]:
    """Yield each goal that some comparison is about.

    Args:
        found: outcomes of the comparisons.
    """

    def farthest(
        text: str,
        patterns: Callable[[str], bool],
        value: Callable[[Outcomes], Interval],
        misses: Callable[[Interval], float],
        digits: str,
    ) -> Iterator[Goal]:
        of = {comparison: value(runs) for comparison, runs in found.items() if patterns(comparison.pattern)}
        if of:
            comparison, interval = max(of.items(), key=lambda each: misses(each[1]))
            job = f"{comparison.pattern}, {JOBS[comparison.job].title}, {comparison.n} workers"
            measured = interval_text(interval, digits) if interval.pairs else unreached(found[comparison][AUTO])
            yield Goal(text, f"{measured}: {job}", misses(interval) <= 0)

    yield from farthest(
        f"where no worker is slow, at most {SLOWEST_HEALTHY:.2f} x the time of DDP",
        lambda pattern: pattern == "none",
        lambda runs: _times(_faster(runs, DDP)),
        lambda times: times.estimate - SLOWEST_HEALTHY,
        ".2f",
    )
    yield from farthest(
        f"everywhere, at most {SLOWEST:g} x the time of the better of DDP with and without the slow worker",
        lambda _: True,
        lambda runs: _times(_than_both(runs)),
        lambda times: times.estimate - SLOWEST,
        ".2f",
    )
    yield from farthest(
        f"{', '.join(FASTER_PATTERNS)}: at least {FASTER:g} times faster than both, surely {SURELY_FASTER:g} times",
        lambda pattern: pattern in FASTER_PATTERNS,
        _than_both,
        lambda faster: max(FASTER - faster.estimate, SURELY_FASTER - faster.low),
        ".2f",
    )
    yield from farthest(
        f"final loss at most {HIGHER:g} nats above that of DDP, surely at most {SURELY_HIGHER:g}",
        lambda _: True,
        lambda runs: loss_difference(runs[AUTO], runs[DDP]) or Interval(estimate=inf, low=inf, high=inf, pairs=0),
        lambda higher: max(higher.estimate - HIGHER, higher.high - SURELY_HIGHER),
        "+.3f",
    )


def _faster(runs: Outcomes, than: str) -> Interval:
    return speed_up(runs[AUTO], runs[than]) or NEVER


def _than_both(runs: Outcomes) -> Interval:
    return min((_faster(runs, than) for than in (DDP, WITHOUT_SLOW)), key=lambda faster: faster.estimate)


def _times(faster: Interval) -> Interval:
    """Return the ratio of the times whose inverse tells how many times faster a contender is."""
    low, estimate, high = (1 / each if each else inf for each in (faster.high, faster.estimate, faster.low))
    return Interval(estimate=estimate, low=low, high=high, pairs=faster.pairs)
