"""Reproduce Fig. 5, 8, 10, 11 and 15 of Sync-Switch; runs saved in results/ are not repeated.

python -m papers.sync_switch.run --folder data --processes 2                  # all figures, in the small version
python -m papers.sync_switch.run --folder data --figure 5 --only "share/bsp"  # some series of one figure
python -m papers.sync_switch.run --folder data --figure 10 --only "set-up 1" --device cuda
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from papers.command import Paper
from papers.store import Store
from papers.sync_switch.settings import FIGURES, RESULTS
from papers.sync_switch.training import runs
from papers.tasks import Task


def tasks(figure: str, seeds: int | None, only: str) -> list[Task]:
    """Return the tasks of a figure."""
    return list(runs(figure, seeds, only))


def store(figure: str, folder: Path) -> Store:
    """Return the store of a figure; all runs are in one file, because figures share them."""
    return Store(folder / "training.jsonl")


def main(arguments: Sequence[str] | None = None) -> None:
    Paper(__doc__ or "", list(FIGURES), RESULTS, tasks, store, only="^small").run(arguments)


if __name__ == "__main__":
    main()
