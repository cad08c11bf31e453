"""Compare paceline with DDP and its alternatives under seven patterns of slowness; saved runs are not repeated.

python -m papers.ddp.run --folder data                          # everything; results/tables.md by papers.ddp.table
python -m papers.ddp.run --folder data --pattern rotating       # what one pattern needs
python -m papers.ddp.run --pattern rotating --quick             # a trial of one pattern in two minutes, without data
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from papers.command import Paper
from papers.ddp.patterns import PATTERNS
from papers.ddp.settings import CONTENDERS, DDP, GRID, JOBS, RESULTS, TUNING_SEEDS, Comparison
from papers.ddp.training import Timed, Untimed
from papers.store import Store
from papers.tasks import Task

FIGURES = ("rates", "untimed", "timed")


def tasks(figure: str, seeds: int | None, only: str) -> list[Task]:
    """Return the tasks of a figure whose "job/n/pattern/contender" has a match of a regular expression."""
    if figure == "rates":
        return [
            Untimed(job, n, DDP, seed, rate)
            for job, about in JOBS.items()
            for n in about.gradients
            if re.search(only, f"{job}/{n}//{DDP}")
            for rate in about.rates
            for seed in TUNING_SEEDS
        ]
    wanted = _untimed if figure == "untimed" else _timed
    return [task for comparison in GRID for task in wanted(comparison, seeds, only)]


def _untimed(comparison: Comparison, seeds: int | None, only: str) -> Iterator[Task]:
    for seed, name in _runs(comparison, seeds, only):
        if not CONTENDERS[name].is_timed(dies=PATTERNS[comparison.pattern].dies):
            yield Untimed(comparison.job, comparison.n, name, seed, JOBS[comparison.job].lr[comparison.n])


def _timed(comparison: Comparison, seeds: int | None, only: str) -> Iterator[Task]:
    for seed, name in _runs(comparison, seeds, only):
        if CONTENDERS[name].is_timed(dies=PATTERNS[comparison.pattern].dies):
            lr = JOBS[comparison.job].lr[comparison.n]
            yield Timed(comparison.job, comparison.n, comparison.pattern, name, seed, lr)


def _runs(comparison: Comparison, seeds: int | None, only: str) -> Iterator[tuple[int, str]]:
    """Yield seed and contender of each run, seed by seed, so that finished runs are paired."""
    for seed in range(seeds or comparison.seeds):
        for name in comparison.contenders:
            if re.search(only, f"{comparison.job}/{comparison.n}/{comparison.pattern}/{name}"):
                yield seed, name


def store(figure: str, folder: Path) -> Store:
    """Return the store of a figure."""
    return Store(folder / f"{figure}.jsonl")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--pattern", choices=list(PATTERNS))
    parser.add_argument("--quick", action="store_true")
    given, rest = parser.parse_known_args(arguments)
    only = f"/{given.pattern}/" if given.pattern else ""
    Paper(__doc__ or "", FIGURES, RESULTS, tasks, store, only=only).run(rest)


if __name__ == "__main__":
    main()
