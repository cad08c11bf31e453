"""Reproduce the figures of the DBW paper; a run that is kept in results/ already is not done again.

python -m papers.dbw.run --folder data/mnist                       # all figures that fit a CPU
python -m papers.dbw.run --figure 6 --only alpha=1/dbw             # a part of one
python -m papers.dbw.run --figure 5 --folder data/cifar-10-batches-bin --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from papers.dbw.durations import Durations
from papers.dbw.grid import runs
from papers.dbw.settings import RESULTS, TRACED
from papers.dbw.traces import Trace
from papers.store import Store, machine
from papers.tasks import Task, Where, carry_out

ON_CPU = ("3", "6", "9", "1", "4", "options", "8", "10")
ALL = ("1", "2", "3", "4", "5", "6", "8", "9", "10", "options")


def main(arguments: Sequence[str] | None = None) -> None:
    args = options(arguments)
    where = Where(args.folder, args.device, args.updates)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "machine.json").write_text(machine())
    for figure in args.figure or ON_CPU:
        carry_out(
            tasks(figure, args.seeds, args.only), where, Store(args.out / f"figure{figure}.jsonl"), args.processes
        )


def tasks(figure: str, seeds: int | None, only: str) -> list[Task]:
    """Return what there is to do for a figure."""
    if figure == "3":
        return [Durations(seed) for seed in range(seeds or 3)]
    if figure in TRACED:
        about = TRACED[figure]
        return [Trace(figure, cluster, seed) for cluster in about.clusters for seed in range(seeds or about.seeds)]
    return list(runs(figure, seeds, only))


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--figure", action="append", choices=ALL, help="may be repeated; those that fit a CPU if not given"
    )
    parser.add_argument("--folder", type=Path, default=Path("data/mnist"), help="with the data set")
    parser.add_argument("--seeds", type=int, help="runs of each series; the figure's own number if not given")
    parser.add_argument("--only", default="", help="regular expression found in 'case/series', as alpha=1/dbw")
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
