"""Reproduce Fig. 5 to 14 of "Slow and Stale Gradients"; runs saved in results/ are not repeated.

python -m papers.slow_and_stale.run --folder data --processes 2           # all figures
python -m papers.slow_and_stale.run --folder data --figure 8 --only bsp   # some series of one figure
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from papers.command import Paper
from papers.slow_and_stale.predicted import ErrorBounds, runtimes
from papers.slow_and_stale.settings import FIGURES, RESULTS, TIMES
from papers.slow_and_stale.training import runs
from papers.store import Store
from papers.tasks import Task

ALL = ("5", "6", "7", "8", "9", "10", "11", "12", "13", "14")


def tasks(figure: str, seeds: int | None, only: str) -> list[Task]:
    """Return the tasks of a figure."""
    if figure == "7":
        return [ErrorBounds()]
    if figure in TIMES:
        return list(runtimes(figure, seeds))
    return list(runs(figure, seeds, only))


def store(figure: str, folder: Path) -> Store:
    """Return the store of a figure; all training runs are in one file, because figures share them."""
    return Store(folder / ("training.jsonl" if figure in FIGURES else f"figure{figure}.jsonl"))


def main(arguments: Sequence[str] | None = None) -> None:
    Paper(__doc__ or "", ALL, RESULTS, tasks, store).run(arguments)


if __name__ == "__main__":
    main()
