"""Run the experiments of DC-S3GD; runs saved in results/ are not repeated.

python -m papers.dc_s3gd.run --folder data                                  # all figures that fit a CPU
python -m papers.dc_s3gd.run --folder data --figure rates --only dc_s3gd    # some series of one figure
python -m papers.dc_s3gd.run --folder data --figure table1 --only ^cifar10-resnet50 --device cuda
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from papers.command import Paper
from papers.dc_s3gd.settings import FIGURES, RESULTS
from papers.dc_s3gd.times import TIMES, times
from papers.dc_s3gd.training import runs
from papers.store import Store
from papers.tasks import Task

SMALL = "^(mnist|cifar10)(,|/)"


def tasks(figure: str, seeds: int | None, only: str) -> list[Task]:
    """Return the tasks of a figure."""
    if figure in TIMES:
        return list(times(figure, seeds))
    return list(runs(figure, seeds, only))


def store(figure: str, folder: Path) -> Store:
    """Return the store of a figure; all training runs are in one file, because figures share them."""
    return Store(folder / ("training.jsonl" if figure in FIGURES else f"{figure}.jsonl"))


def main(arguments: Sequence[str] | None = None) -> None:
    Paper(__doc__ or "", [*TIMES, *FIGURES], RESULTS, tasks, store, only=SMALL).run(arguments)


if __name__ == "__main__":
    main()
