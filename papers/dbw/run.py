"""Reproduce the figures of the DBW paper; runs saved in results/ are not repeated.

python -m papers.dbw.run --folder data/mnist                       # all figures that fit a CPU
python -m papers.dbw.run --figure 6 --only alpha=1/dbw             # some series of one figure
python -m papers.dbw.run --figure 5 --folder data/cifar-10-batches-bin --device cuda
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from papers.command import Paper
from papers.dbw.durations import Durations
from papers.dbw.grid import runs
from papers.dbw.interrupts import ALPHAS, SEEDS, Interrupted
from papers.dbw.settings import RESULTS, TRACED
from papers.dbw.traces import Trace
from papers.store import Store
from papers.tasks import Task

ON_CPU = ("3", "interrupts", "6", "9", "1", "4", "options", "8", "10")
ALL = ("1", "2", "3", "4", "5", "6", "8", "9", "10", "options", "interrupts")


def tasks(figure: str, seeds: int | None, only: str) -> list[Task]:
    """Return the tasks of a figure."""
    if figure == "3":
        return [Durations(seed) for seed in range(seeds or 3)]
    if figure == "interrupts":
        return [
            Interrupted(alpha, choice, seed)
            for choice, own in SEEDS.items()
            for seed in range(seeds or own)
            for alpha in ALPHAS
        ]
    if figure in TRACED:
        about = TRACED[figure]
        return [Trace(figure, cluster, seed) for cluster in about.clusters for seed in range(seeds or about.seeds)]
    return list(runs(figure, seeds, only))


def store(figure: str, folder: Path) -> Store:
    """Return the store of a figure."""
    return Store(folder / f"figure{figure}.jsonl")


def main(arguments: Sequence[str] | None = None) -> None:
    description = __doc__ or ""
    Paper(description, ALL, RESULTS, tasks, store, by_default=ON_CPU, folder=Path("data/mnist")).run(arguments)


if __name__ == "__main__":
    main()
