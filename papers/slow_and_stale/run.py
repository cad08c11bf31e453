"""Reproduce Fig. 5 to 12 of "Slow and Stale Gradients"; a run that is kept in results/ already is not done again.

python -m papers.slow_and_stale.run --folder data --processes 2           # all figures
python -m papers.slow_and_stale.run --folder data --figure 8 --only bsp   # a part of one
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from papers.slow_and_stale.predicted import ErrorBounds, runtimes
from papers.slow_and_stale.settings import FIGURES, RESULTS, TIMES
from papers.slow_and_stale.training import runs
from papers.store import Store, machine
from papers.tasks import Task, Where, carry_out

ALL = ("5", "6", "7", "8", "9", "10", "11", "12")


def main(arguments: Sequence[str] | None = None) -> None:
    args = options(arguments)
    where = Where(args.folder, args.device, args.updates)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "machine.json").write_text(machine())
    for figure in args.figure or ALL:
        carry_out(tasks(figure, args.seeds, args.only), where, store(figure, args.out), args.processes)


def tasks(figure: str, seeds: int | None, only: str) -> list[Task]:
    """Return what there is to do for a figure."""
    if figure == "7":
        return [ErrorBounds()]
    if figure in TIMES:
        return list(runtimes(figure, seeds))
    return list(runs(figure, seeds, only))


def store(figure: str, folder: Path) -> Store:
    """Return where the lines of a figure are; all training runs are in one file, because figures share them."""
    return Store(folder / ("training.jsonl" if figure in FIGURES else f"figure{figure}.jsonl"))


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", action="append", choices=ALL, help="may be repeated; all if not given")
    parser.add_argument("--folder", type=Path, default=Path("data"), help="with mnist/ and cifar-10-batches-bin/")
    parser.add_argument("--seeds", type=int, help="runs of each series; the figure's own number if not given")
    parser.add_argument("--only", default="", help="regular expression found in 'case/series', as 1/asp; Fig. 8 to 12")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--updates", type=int, help="end every run after so many, to try a figure out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(arguments)
    if args.updates and args.out == RESULTS:
        parser.error("--updates ends runs early, and they must not stand among the results: give --out FOLDER with it")
    return args


if __name__ == "__main__":
    main()
