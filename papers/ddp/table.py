"""Write results/tables.md: a table for each comparison that has results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean

from paceline.utils.confidence_intervals import Interval
from papers.ddp.outcomes import Outcome, Outcomes, all_lines, loss_difference, outcomes, speed_up
from papers.ddp.patterns import PATTERNS
from papers.ddp.settings import DDP, GRID, JOBS, RESULTS, WITHOUT_SLOW, Comparison

HEAD = (
    "contender",
    "final loss - DDP's",
    "seconds for equal samples",
    "seconds to the target",
    "times faster than DDP",
    "... than DDP without the slow worker",
    "rank-seconds / DDP's",
    "slow worker's share",
)


def main(folder: Path = RESULTS) -> None:
    (folder / "tables.md").write_text("\n".join(tables(folder)) + "\n")


def tables(folder: Path) -> Iterator[str]:
    """Yield the lines of a page with one table for each comparison."""
    lines = all_lines(folder)
    yield from ["# DDP and paceline: every comparison", ""]
    for comparison in GRID:
        found = outcomes(comparison, lines)
        if len(found[DDP]) > 1 and any(runs for name, runs in found.items() if name not in (DDP, WITHOUT_SLOW)):
            yield from [f"## {title(comparison)}", "", *table(found), ""]


def title(comparison: Comparison) -> str:
    """Return the title of a comparison."""
    return f"{JOBS[comparison.job].title}, {comparison.n} workers: {PATTERNS[comparison.pattern].text}"


def table(found: Outcomes) -> Iterator[str]:
    """Yield the table of a comparison, a row for each contender that has runs."""
    yield f"| {' | '.join(HEAD)} |"
    yield f"| {' | '.join('---' for _ in HEAD)} |"
    for name, runs in found.items():
        if runs:
            yield f"| {' | '.join([name, *_row(name, found)])} |"


def _row(name: str, found: Outcomes) -> Iterator[str]:
    runs, ddp, without = found[name], found[DDP], found[WITHOUT_SLOW]
    pairs = [(runs[seed], ddp[seed]) for seed in runs]
    yield "-" if name == DDP else _shown(loss_difference(runs, ddp), "+.3f")
    yield f"{fmean(run.run_s for run in runs.values()):.1f}"
    yield _seconds(list(runs.values()))
    yield "-" if name == DDP else _shown(speed_up(runs, ddp), ".2f")
    yield "-" if name == WITHOUT_SLOW else _shown(speed_up(runs, without), ".2f")
    reached = [(our, their) for our, their in pairs if isfinite(our.target_s)]
    ratios = [our.ranks * our.target_s / (their.ranks * their.target_s) for our, their in reached]
    yield f"{fmean(ratios):.2f}" if len(ratios) == len(pairs) else "-"
    yield f"{100 * fmean(run.slow_share for run in runs.values()):.1f} %"


def _seconds(runs: Sequence[Outcome]) -> str:
    reached = [run.target_s for run in runs if isfinite(run.target_s)]
    missed = len(runs) - len(reached)
    shown = f"{fmean(reached):.1f}" if reached else ""
    return f"{shown} ({missed} of {len(runs)} not reached)".strip() if missed else shown


def _shown(interval: Interval | None, digits: str) -> str:
    if interval is None:
        return "-"
    return f"{interval.estimate:{digits}} ({interval.low:{digits}} to {interval.high:{digits}})"


if __name__ == "__main__":
    main()
