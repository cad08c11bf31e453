"""Command line that the papers share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from papers.store import Store, machine
from papers.tasks import Task, Where, carry_out


@dataclass(frozen=True)
class Paper:
    """Command line of one paper.

    Args:
        description: text of `--help`, with examples.
        figures: names of all figures.
        results: folder of the saved results.
        tasks: function from a figure, the seeds per series (None for the figure's own number) and `--only` to tasks.
        store: function from a figure and a folder to the store of its lines.
        by_default: figures that run without `--figure`; all if empty.
        only: default of `--only`.
        folder: default folder of the data.
    """

    description: str
    figures: Sequence[str]
    results: Path
    tasks: Callable[[str, int | None, str], Sequence[Task]]
    store: Callable[[str, Path], Store]
    by_default: Sequence[str] = ()
    only: str = ""
    folder: Path = Path("data")

    def run(self, arguments: Sequence[str] | None = None) -> None:
        """Run the selected figures; finished runs are not repeated."""
        args = self._options(arguments)
        where = Where(args.folder, args.device, args.updates)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "machine.json").write_text(machine())
        for figure in args.figure or self.by_default or self.figures:
            carry_out(self.tasks(figure, args.seeds, args.only), where, self.store(figure, args.out), args.processes)

    def _options(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        default = ", ".join(self.by_default) or "all"
        parser.add_argument(
            "--figure",
            action="append",
            choices=self.figures,
            help=f"figure, may be repeated (default: {default})",
        )
        parser.add_argument("--folder", type=Path, default=self.folder, help="data folder (default: %(default)s)")
        parser.add_argument("--seeds", type=int, help="number of seeds per series (default: that of the figure)")
        parser.add_argument(
            "--only", default=self.only, help="regular expression to find in 'case/series' (default: '%(default)s')"
        )
        parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
        parser.add_argument("--processes", type=int, default=1, help="number of parallel runs")
        parser.add_argument("--updates", type=int, help="end every run after this number of updates, as a trial")
        parser.add_argument("--out", type=Path, default=self.results, help="folder of the results")
        args = parser.parse_args(arguments)
        if args.updates and args.out == self.results:
            parser.error("--updates ends runs early, so they are no results of the paper: add --out FOLDER")
        return args


class Case(Protocol):
    """Panel of a figure."""

    @property
    def series(self) -> Sequence[Any]:
        """Series of the panel."""

    @property
    def seeds(self) -> int:
        """Number of seeds per series."""


def seed_by_seed(cases: Mapping[str, Case], seeds: int | None, only: str) -> Iterator[tuple[str, Any, int]]:
    """Yield case, series and seed of each run, seed by seed, so that finished runs are paired.

    Args:
        cases: cases by name.
        seeds: number of seeds per series, >= 1; None for that of the case.
        only: regular expression to find in "case/series", for example "alpha=1/dbw".
    """
    for seed in range(max(seeds or case.seeds for case in cases.values())):
        for name, case in cases.items():
            if seed < (seeds or case.seeds):
                for series in case.series:
                    if re.search(only, f"{name}/{series.name}"):
                        yield name, series, seed
