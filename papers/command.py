"""The command that every paper has: which of its figures to do, on what, and where the results go."""

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
    """A paper, as its command line knows it.

    Args:
        says: what the command does, with examples.
        figures: that it can do; all of them if none is asked for.
        results: folder of what is kept.
        tasks: of a figure, given the seeds of each series (None for the figure's own number) and what `--only` says.
        store: where the lines of a figure are, in a folder.
        by_default: figures that are done if none is asked for, where that is not all.
        only: what `--only` is if it is not given.
        folder: of the data, if it is not given.
    """

    says: str
    figures: Sequence[str]
    results: Path
    tasks: Callable[[str, int | None, str], Sequence[Task]]
    store: Callable[[str, Path], Store]
    by_default: Sequence[str] = ()
    only: str = ""
    folder: Path = Path("data")

    def run(self, arguments: Sequence[str] | None = None) -> None:
        """Do what is asked for and not done yet."""
        args = self._options(arguments)
        where = Where(args.folder, args.device, args.updates)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "machine.json").write_text(machine())
        for figure in args.figure or self.by_default or self.figures:
            carry_out(self.tasks(figure, args.seeds, args.only), where, self.store(figure, args.out), args.processes)

    def _options(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=self.says, formatter_class=argparse.RawDescriptionHelpFormatter)
        default = ", ".join(self.by_default) or "all"
        parser.add_argument(
            "--figure", action="append", choices=self.figures, help=f"may be repeated; {default} if not given"
        )
        parser.add_argument("--folder", type=Path, default=self.folder, help="of the data; %(default)s if not given")
        parser.add_argument("--seeds", type=int, help="runs of each series; the figure's own number if not given")
        parser.add_argument(
            "--only", default=self.only, help="regular expression found in 'case/series'; '%(default)s' if not given"
        )
        parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
        parser.add_argument("--processes", type=int, default=1, help="runs at a time")
        parser.add_argument("--updates", type=int, help="end every run after so many, to try a figure out")
        parser.add_argument("--out", type=Path, default=self.results, help="folder of the results")
        args = parser.parse_args(arguments)
        if args.updates and args.out == self.results:
            parser.error(
                "--updates ends runs early, and they must not stand among the results: give --out FOLDER with it"
            )
        return args


class Case(Protocol):
    """A panel of a figure."""

    @property
    def series(self) -> Sequence[Any]:
        """What runs in it."""

    @property
    def seeds(self) -> int:
        """Runs of each series."""


def seed_by_seed(cases: Mapping[str, Case], seeds: int | None, only: str) -> Iterator[tuple[str, Any, int]]:
    """Yield the name of the case, the series and the seed of each run, so that whatever is finished is paired.

    Args:
        cases: by name.
        seeds: of each series; the case's own number if not given.
        only: regular expression that is to be found in "case/series", as "alpha=1/dbw".
    """
    for seed in range(max(seeds or case.seeds for case in cases.values())):
        for name, case in cases.items():
            if seed < (seeds or case.seeds):
                for series in case.series:
                    if re.search(only, f"{name}/{series.name}"):
                        yield name, series, seed
