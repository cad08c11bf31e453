"""Compare paceline with DDP and its alternatives under seven patterns of slowness; saved runs are not repeated.

python -m papers.ddp.run --folder data                          # everything; results/tables.md by papers.ddp.table
python -m papers.ddp.run --folder data --pattern rotating       # what one pattern needs
python -m papers.ddp.run --folder data --figure real            # 4 real processes, on a machine that does nothing else
python -m papers.ddp.run --pattern rotating --quick             # a trial of one pattern in two minutes, without data
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence

from papers.command import Paper
from papers.ddp import real
from papers.ddp.patterns import PATTERNS
from papers.ddp.quick import show
from papers.ddp.settings import DDP, GRID, JOBS, RESULTS, TUNING_SEEDS
from papers.ddp.training import Timed, Untimed, task_of, trained
from papers.store import figure_store
from papers.tasks import Task

BY_DEFAULT = ("rates", "untimed", "timed")
FIGURES = (*BY_DEFAULT, "real")


def tasks(figure: str, seeds: int | None, only: str) -> list[Task]:
    """Return the tasks of a figure whose "job/n/pattern/contender" has a match of a regular expression."""
    if figure == "rates":
        return [
            Untimed(job, n, DDP, seed, rate)
            for job, about in JOBS.items()
            for n in about.gradients
            if re.search(only, f"{job}/{n}//{DDP}")
            for rate in about.rates
            for seed in TUNING_SEEDS[: about.tunings]
        ]
    if figure == "real":
        return [*real.tasks(seeds, only)]
    kind = Timed if figure == "timed" else Untimed
    return [task for task in _tasks(seeds, only) if isinstance(task, kind)]


def _tasks(seeds: int | None, only: str) -> Iterator[Task]:
    """Yield the tasks of all comparisons, seed by seed, so that finished runs are paired."""
    for seed in range(seeds or max(comparison.seeds for comparison in GRID)):
        for comparison in GRID:
            for name in trained(comparison) if seed < (seeds or comparison.seeds) else ():
                if re.search(only, f"{comparison.job}/{comparison.n}/{comparison.pattern}/{name}"):
                    yield task_of(comparison, name, seed, JOBS[comparison.job].lr[comparison.n])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--pattern", choices=list(PATTERNS))
    parser.add_argument("--quick", action="store_true")
    given, rest = parser.parse_known_args(arguments)
    if given.quick:
        if not given.pattern or rest:
            parser.error("--quick shows one pattern: type for example --pattern rotating --quick, without more options")
        show(given.pattern)
        return
    only = f"/{given.pattern}/" if given.pattern else ""
    Paper(__doc__ or "", FIGURES, RESULTS, tasks, figure_store, by_default=BY_DEFAULT, only=only).run(rest)


if __name__ == "__main__":
    main()
