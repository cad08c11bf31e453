"""Trial of one pattern on the digits, which takes two minutes and needs no data folder."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from statistics import fmean

from paceline.utils.text_table import TextTable, paragraph
from papers.ddp.outcomes import Outcomes, loss_difference, outcomes, speed_up
from papers.ddp.patterns import PATTERNS
from papers.ddp.settings import DDP, JOBS, MARGIN, TRIAL_SEEDS, TRIED, Comparison
from papers.ddp.training import task_of, trained
from papers.store import Line
from papers.tasks import Where

HEAD = ("contender", "final loss\n- DDP's", "seconds to\nthe target", "times faster\nthan DDP", "not\nreached")


def show(pattern: str) -> None:
    """Run some contenders under a pattern, and print their table."""
    comparison = Comparison("digits", 8, pattern, TRIED, TRIAL_SEEDS)
    print(paragraph(f"{PATTERNS[pattern].text}: digits, 8 simulated workers, {TRIAL_SEEDS} seeds."))
    found = outcomes(comparison, list(_lines(comparison)))
    print("", *TextTable(HEAD, list(_rows(found))).text(), sep="\n")
    about = f"The target is DDP's final validation loss + {MARGIN}. Times are virtual; intervals are of 95 %."
    print("", paragraph(about), sep="\n")


def _lines(comparison: Comparison) -> Iterator[Line]:
    lr, where = JOBS[comparison.job].lr[comparison.n], Where(Path())
    for seed in range(comparison.seeds):
        for name in trained(comparison):
            task = task_of(comparison, name, seed, lr)
            yield {"asked": task.asked(), **task.carry_out(where)}


def _rows(found: Outcomes) -> Iterator[list[str]]:
    for name, runs in found.items():
        loss, faster = loss_difference(runs, found[DDP]), speed_up(runs, found[DDP])
        reached = [run.target_s for run in runs.values() if isfinite(run.target_s)]
        yield [
            name,
            f"{loss.estimate:+.3f}" if loss is not None else "-",
            f"{fmean(reached):.1f}" if reached else "-",
            f"{faster.estimate:.2f} ({faster.low:.2f} to {faster.high:.2f})" if faster is not None else "-",
            str(len(runs) - len(reached)),
        ]
