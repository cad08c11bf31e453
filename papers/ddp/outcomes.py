"""Outcomes of the runs: losses at equal samples, and seconds to DDP's final loss plus a margin."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf, nan
from pathlib import Path
from typing import NamedTuple

from paceline.utils.confidence_intervals import Interval, paired_difference, paired_ratio
from papers.ddp.patterns import PATTERNS
from papers.ddp.settings import AUTO, CONTENDERS, DDP, GRID, JOBS, MARGIN, Comparison
from papers.ddp.times import seconds_at, slow_share_of
from papers.store import Line, Store


class Outcome(NamedTuple):
    """Outcome of one run.

    Attributes:
        loss: validation loss at the end of the run, the same number of samples for every contender.
        accuracy: validation accuracy there, in [0, 1]; nan if the job has none.
        run_s: virtual seconds of the run.
        target_s: virtual seconds to the final loss of DDP with the same seed, plus the margin; inf if not reached.
        ranks: number of workers.
        slow_share: share of the used samples that the slow worker has computed.
    """

    loss: float
    accuracy: float
    run_s: float
    target_s: float
    ranks: int
    slow_share: float


Outcomes = Mapping[str, Mapping[int, Outcome]]  # by contender and seed


def all_lines(folder: Path) -> list[Line]:
    """Return the results of all runs in a folder, those of the search for rates left out."""
    return [line for name in ("untimed", "timed") for line in Store(folder / f"{name}.jsonl").lines()]


def outcomes(comparison: Comparison, lines: Sequence[Line]) -> Outcomes:
    """Return the outcomes of a comparison, by contender and seed, of the seeds that DDP has finished.

    Args:
        comparison: part of the grid.
        lines: results of all runs.
    """
    wanted = [line for line in lines if _is_of(line, comparison)]
    found = {(line["asked"]["series"], line["asked"]["seed"]): line for line in wanted}
    trained_as = {
        name: CONTENDERS[name].trained_as(name, PATTERNS[comparison.pattern].dies) for name in comparison.contenders
    }
    targets = {seed: line["evaluated"][-1]["loss"] + MARGIN for (name, seed), line in found.items() if name == DDP}
    return {
        name: {
            seed: _outcome(comparison, name, seed, found[trained_as[name], seed], target)
            for seed, target in sorted(targets.items())
            if (trained_as[name], seed) in found
        }
        for name in comparison.contenders
    }


def shown(
    lines: Sequence[Line], contenders: Collection[str] = tuple(CONTENDERS), pattern: str | None = None
) -> dict[Comparison, Outcomes]:
    """Return the outcomes of the comparisons in which DDP and `auto` have two seeds or more.

    Args:
        lines: results of all runs.
        contenders: contenders that are shown, DDP and `auto` among them.
        pattern: pattern of the comparisons; None for all patterns.
    """
    found = {}
    for comparison in GRID:
        if pattern in (None, comparison.pattern):
            names = [name for name in comparison.contenders if name in contenders]
            found[comparison] = outcomes(comparison._replace(contenders=names), lines)
    return {comparison: runs for comparison, runs in found.items() if all(len(runs[name]) > 1 for name in (DDP, AUTO))}


def _is_of(line: Line, comparison: Comparison) -> bool:
    asked = line["asked"]
    job, n, pattern = comparison.job, comparison.n, comparison.pattern
    is_timed = CONTENDERS[asked["series"]].is_timed(dies=PATTERNS[pattern].dies)
    return (asked["job"], asked["n"], asked["lr"], asked.get("pattern")) == (
        job,
        n,
        JOBS[job].lr[n],
        pattern if is_timed else None,
    )


def _outcome(comparison: Comparison, name: str, seed: int, line: Line, target: float) -> Outcome:
    evaluated, ranks = line["evaluated"], comparison.n - CONTENDERS[name].without_slow
    reached = next((each for each in evaluated if each["loss"] <= target), None)

    def seconds(each: Line) -> float:
        if "time_s" in each:
            return float(each["time_s"])
        return seconds_at(comparison.job, comparison.n, PATTERNS[comparison.pattern], name, int(each["updates"]), seed)

    last = evaluated[-1]
    slow_share = line.get("slow_share")
    if slow_share is None:
        slow_share = slow_share_of(comparison.job, comparison.n, PATTERNS[comparison.pattern], name, seed)
    return Outcome(
        last["loss"],
        last.get("accuracy", nan),
        seconds(last),
        seconds(reached) if reached is not None else inf,
        ranks,
        slow_share,
    )


def speed_up(ours: Mapping[int, Outcome], theirs: Mapping[int, Outcome]) -> Interval | None:
    """Return the geometric mean of theirs / ours in seconds to the target, paired by seed, with a 95 % interval.

    None if fewer than two seeds are paired, or if one of their runs has not reached the target.
    """
    return paired_ratio(_of(theirs, "target_s"), _of(ours, "target_s"))


def loss_difference(ours: Mapping[int, Outcome], theirs: Mapping[int, Outcome]) -> Interval | None:
    """Return the mean of the differences of the final losses, ours - theirs, paired by seed, with a 95 % interval."""
    return paired_difference(_of(theirs, "loss"), _of(ours, "loss"))


def unreached(runs: Mapping[int, Outcome]) -> str:
    """Return how many runs have not reached the target, as text."""
    return f"{sum(outcome.target_s == inf for outcome in runs.values())} of {len(runs)} not reached"


def interval_text(interval: Interval, digits: str) -> str:
    """Return an interval as text.

    >>> interval_text(Interval(2.0, 1.5, 2.5, pairs=5), ".2f")
    '2.00 (1.50 to 2.50)'
    """
    return f"{interval.estimate:{digits}} ({interval.low:{digits}} to {interval.high:{digits}})"


def _of(runs: Mapping[int, Outcome], name: str) -> dict[int, float]:
    return {seed: getattr(outcome, name) for seed, outcome in runs.items()}
