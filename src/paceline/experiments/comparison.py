"""The table of a comparison, 80 columns wide: blocks one below the other, a row a protocol in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from statistics import mean
from typing import Any, Literal, get_args

from rich.console import Group
from rich.text import Text

from paceline.core.stop import Stop
from paceline.errors import RunError
from paceline.experiments.paired_differences import PairedDifference, differences, in_words
from paceline.experiments.runner.ending import Crash
from paceline.recording.run_stats import RunStats
from paceline.utils.representation import TableRepresentation
from paceline.utils.text_table import NONE, TextTable, number, paragraph, whole
from paceline.utils.wording import counted, listed

SECONDS_PER_HOUR = 3600
TOLD_CRASHES = 4

Status = Literal["reached", "missed", "diverged", "failed", "not finished"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Spread:
    """A number over several runs.

    Attributes:
        runs: how many of them have it.
        of: how many there are.
    """

    mean: float
    least: float
    most: float
    runs: int
    of: int


@dataclass(frozen=True)
class ComparisonRow:
    """The runs of one protocol.

    Attributes:
        protocol: as the user has written it.
        runs: the figures of those that have ended, by seed.
        crashes: why others crashed, by seed.
        unfinished: seeds of the runs that have not ended, because the user ended the comparison.
    """

    protocol: str
    runs: Mapping[int, RunStats]
    crashes: Mapping[int, Crash] = field(default_factory=dict)
    unfinished: Sequence[int] = ()

    @property
    def seeds(self) -> list[int]:
        """All seeds, with figures or without."""
        return sorted({*self.runs, *self.crashes, *self.unfinished})

    def status(self, seed: int, stop: Stop) -> Status:
        """Return how the run of a seed came out."""
        if seed in self.crashes:
            return "failed"
        if seed in self.unfinished:
            return "not finished"
        figures = self.runs[seed]
        return "reached" if figures.reached(stop) else "diverged" if figures.diverged else "missed"

    def with_status(self, status: Status, stop: Stop) -> list[int]:
        """Return the seeds of the runs that came out so."""
        return [seed for seed in self.seeds if self.status(seed, stop) == status]

    def shortfall(self, stop: Stop) -> str:
        """Return what became of the runs that did not reach the target, as "missed it with seed 1"."""
        told = []
        for status in STATUSES[1:]:
            seeds = self.with_status(status, stop)
            if seeds:
                with_seeds = "with every seed" if seeds == self.seeds else f"with {listed('seed', seeds)}"
                told.append(f"{'missed it' if status == 'missed' else status} {with_seeds}")
        return " and ".join(told)

    def reaching(self, stop: Stop) -> list[RunStats]:
        """Return the figures of the runs that reached the target."""
        return [figures for figures in self.runs.values() if figures.reached(stop)]

    def always_reaches(self, stop: Stop) -> bool:
        """Return whether there is no seed at which the target was not reached."""
        return bool(self.runs) and len(self.reaching(stop)) == len(self.seeds)

    def numbers(self, number: Callable[[RunStats], float]) -> dict[int, float]:
        """Return a number of each run that has ended, by seed; runs that diverged are left out."""
        return {seed: number(figures) for seed, figures in self.runs.items() if not figures.diverged}

    def mean(self, number: Callable[[RunStats], float]) -> float | None:
        """Return the mean of a number over all runs that have ended."""
        return mean(map(number, self.runs.values())) if self.runs else None


@dataclass(frozen=True, repr=False)
class Comparison(TableRepresentation):
    """Several protocols on the same job and cluster.

    Attributes:
        rows: a protocol each, in the order that was asked for.
        stop: of every run.
        folder: with a folder a run, and the table.
        price: of a worker-hour, if one was given.
        interrupted: whether the user ended it before all runs had ended.
    """

    rows: Sequence[ComparisonRow]
    stop: Stop
    folder: Path
    price: float | None = None
    interrupted: bool = False

    @property
    def goal(self) -> str:
        """What the time is the time to, as "loss 0.2"."""
        return self.stop.goal

    @property
    def failures(self) -> dict[str, Crash]:
        """Why runs crashed, by protocol and seed; runs that missed the target or diverged are not among them."""
        return {f"{row.protocol}, seed {seed}": crash for row in self.rows for seed, crash in row.crashes.items()}

    def over_reaching(self, row: ComparisonRow, number: Callable[[RunStats], float]) -> Spread | None:
        """Return a number over those runs of a row that reached the target; None if none has."""
        values = [number(figures) for figures in row.reaching(self.stop)]
        if not values:
            return None
        return Spread(mean(values), min(values), max(values), len(values), len(row.seeds))

    def time_s(self, row: ComparisonRow) -> Spread | None:
        """Return the seconds to the target."""
        return self.over_reaching(row, lambda figures: figures.time_s)

    def worker_hours(self, row: ComparisonRow) -> Spread | None:
        """Return the worker-hours to the target."""
        return self.over_reaching(row, lambda figures: figures.worker_s / SECONDS_PER_HOUR)

    def speed_up(self, row: ComparisonRow) -> float | None:
        """Return how many times faster than the first protocol; None unless both reach the target at every seed."""
        first, this = self.time_s(self.rows[0]), self.time_s(row)
        fair = self.rows[0].always_reaches(self.stop) and row.always_reaches(self.stop)
        return first.mean / this.mean if fair and first and this and this.mean else None

    def against_first(self, row: ComparisonRow) -> list[PairedDifference]:
        """Return how a protocol differs from the first one: 95 % intervals paired by seed, of two seeds or more."""
        return differences(self.rows[0], row, self.stop)

    def verdict(self) -> str:
        """Say which protocol reached the target first, and by how much."""
        if not self.stop.targets:
            return "The stop has no target, so no protocol won; give loss=, eval_loss=, accuracy= or metric=."
        always = [row for row in self.rows if row.always_reaches(self.stop)]
        times = sorted((spread.mean, row.protocol) for row in always if (spread := self.time_s(row)))
        if not times:
            failed = f"; {counted(len(self.failures), 'run')} failed" if self.failures else ""
            return f"No protocol reached {self.goal} at every seed{failed}."
        (best_s, winner), *others = times
        behind = [f"{time_s / best_s:.1f} x faster than {name}" for time_s, name in others]
        behind += [f"while {row.protocol} {row.shortfall(self.stop)}" for row in self.rows if row not in always]
        return f"{winner} won: {', '.join([f'{self.goal} in {best_s:.2f} s', *behind])}."

    def table(self) -> Group:
        """Return the table for people, 80 columns wide."""
        return table(self)

    def _facts(self) -> Mapping[str, object]:
        runs = {status: sum(len(row.with_status(status, self.stop)) for row in self.rows) for status in STATUSES}
        protocols = ", ".join(row.protocol for row in self.rows)
        return {
            "goal": self.goal,
            "protocols": protocols,
            **{s: n for s, n in runs.items() if n},
            "folder": self.folder,
        }

    def _grids(self) -> list[TextTable]:
        return grids(self)

    def _notes(self) -> list[str]:
        return notes(self)

    def to_json(self) -> bytes:
        """Return all rows with every number of every run; what is not known, or not reached, is null."""
        import orjson

        content = {
            "folder": str(self.folder),
            "goal": self.goal,
            "stop": str(self.stop),
            "rows": [self._plain(row) for row in self.rows],
        }
        return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    def _plain(self, row: ComparisonRow) -> dict[str, Any]:
        worker_hours = self.worker_hours(row)
        return {
            "protocol": row.protocol,
            "seeds": len(row.seeds),
            **{status.replace(" ", "_"): len(row.with_status(status, self.stop)) for status in STATUSES},
            "time_to_target_s": self.time_s(row),
            "speed_up": self.speed_up(row),
            "against_first": {
                each.name: {**each.interval._asdict(), "is_ratio": each.is_ratio, "is_seen": each.is_seen}
                for each in (self.against_first(row) if row is not self.rows[0] else [])
            },
            "worker_hours_to_target": worker_hours,
            "cost_to_target": worker_hours and self.price and worker_hours.mean * self.price,
            "runs": [self._plain_run(row, seed) for seed in row.seeds],
        }

    def _plain_run(self, row: ComparisonRow, seed: int) -> dict[str, Any]:
        status, crash, figures = row.status(seed, self.stop), row.crashes.get(seed), row.runs.get(seed)
        reached = status == "reached"
        told = {"seed": seed, "status": status, "reached": reached, "error": crash and crash.message}
        if figures is None:
            return {**told, "error_file": crash and crash.file and str(crash.file), "time_to_target_s": None}
        worker_hours = figures.worker_s / SECONDS_PER_HOUR
        return {
            **told,
            "time_to_target_s": figures.time_s if reached else None,
            "worker_hours_to_target": worker_hours if reached else None,
            "cost_to_target": worker_hours * self.price if reached and self.price is not None else None,
            **figures.plain(),
        }


class FailedRunsError(RunError):
    """Runs of a comparison crashed; the others are done, and their results are in `comparison`."""

    def __init__(self, comparison: Comparison) -> None:
        crashes = comparison.failures
        runs = sum(len(row.seeds) for row in comparison.rows)
        told = [f"{run}: {crash}" for run, crash in list(crashes.items())[:TOLD_CRASHES]]
        more = [f"and {len(crashes) - TOLD_CRASHES} more"] if len(crashes) > TOLD_CRASHES else []
        super().__init__(
            f"{len(crashes)} of {counted(runs, 'run')} failed: {'; '.join([*told, *more])}; "
            f"ask the same again with out={str(comparison.folder)!r} to run only these again"
        )
        self.comparison = comparison


MOST_METRICS = 2  # of those that the stop asks for, in 80 columns

Cell = Callable[[ComparisonRow], str]


def grids(comparison: Comparison) -> list[TextTable]:
    """Return all blocks."""
    blocks = (_to_target(comparison), _WORK, _samples(comparison))
    return [_block(columns, comparison.rows) for columns in blocks]


def table(comparison: Comparison) -> Group:
    """Return all blocks, with a note on what is missing and the verdict, for a terminal with colours."""
    blocks: list[Text] = []
    for grid in grids(comparison):
        head, body = grid.text()
        blocks += [Text(head, style="bold", no_wrap=True), Text(f"{body}\n", no_wrap=True)]
    *others, verdict = map(paragraph, notes(comparison))
    return Group(*blocks, *map(Text, others), Text(verdict, style="bold"))


def spread(given: Spread) -> str:
    """Return the mean, the range, and of how many runs they are if it is not of all."""
    among = "" if given.runs == given.of else f"{given.runs} of {given.of}: "
    around = "" if given.runs == 1 else f" ({number(given.least)} to {number(given.most)})"
    return f"{among}{number(given.mean)}{around}"


def _to_target(comparison: Comparison) -> Mapping[str, Cell]:
    def worker_hours(row: ComparisonRow) -> float | None:
        hours = comparison.worker_hours(row)
        return hours.mean if hours else None

    def cost(row: ComparisonRow) -> float | None:
        hours = worker_hours(row)
        return None if hours is None or comparison.price is None else hours * comparison.price

    columns: dict[str, Cell] = {
        f"seconds to\n{comparison.goal}": lambda row: (
            spread(times) if (times := comparison.time_s(row)) else _without_time(row, comparison.stop)
        ),
        "speed-up over\nthe first": lambda row: number(comparison.speed_up(row)),
        "worker\nhours": lambda row: number(worker_hours(row)),
    }
    return {**columns, "\ncost": lambda row: number(cost(row))} if comparison.price is not None else columns


def _without_time(row: ComparisonRow, stop: Stop) -> str:
    """Return how the runs of a row came out of which none reached the target."""
    seeds: dict[Status, int] = {status: len(row.with_status(status, stop)) for status in STATUSES}
    found = {status: amount for status, amount in seeds.items() if amount}
    return next(iter(found)) if len(found) == 1 else ", ".join(f"{amount} {status}" for status, amount in found.items())


def _mean(figure: Callable[[RunStats], float]) -> Cell:
    return lambda row: number(row.mean(figure))


def _count(figure: Callable[[RunStats], float]) -> Cell:
    return lambda row: whole(row.mean(figure))


_WORK: Mapping[str, Cell] = {
    "\nupdates": _count(lambda figures: figures.updates),
    "mean\nk": _mean(lambda figures: figures.mean_k),
    "gradients\nused": _count(lambda figures: figures.used),
    "\ndropped": _count(lambda figures: figures.dropped),
    "\ninterrupted": _count(lambda figures: figures.interrupted),
    "idle\nshare": lambda row: _share(row.mean(lambda figures: figures.idle_share)),
}


def _samples(comparison: Comparison) -> Mapping[str, Cell]:
    columns: dict[str, Cell] = {
        "samples\napplied": _count(lambda figures: figures.samples_applied),
        "\ndropped": _count(lambda figures: figures.samples_dropped),
        "staleness\nmean": _mean(lambda figures: figures.mean_staleness),
        "\nmax": lambda row: str(max((figures.max_staleness for figures in row.runs.values()), default=NONE)),
        "training\nloss": _mean(lambda figures: figures.loss),
    }
    if any("accuracy" in figures.metrics for row in comparison.rows for figures in row.runs.values()):
        columns["test\naccuracy"] = _metric("accuracy")
    asked = [target.metric for target in comparison.stop.evaluated if target.metric != "accuracy"]
    return columns | {f"test\n{name}": _metric(name) for name in asked[:MOST_METRICS]}


def _metric(name: str) -> Cell:
    return _mean(lambda figures: figures.metrics.get(name, nan))


def _share(value: float | None) -> str:
    return NONE if value is None or isnan(value) else f"{round(100 * value)}%"


def _block(columns: Mapping[str, Cell], rows: Sequence[ComparisonRow]) -> TextTable:
    return TextTable(
        ["protocol", *columns], [[row.protocol, *(cell(row) for cell in columns.values())] for row in rows]
    )


def _shortfalls(row: ComparisonRow, stop: Stop) -> Iterator[str]:
    """Yield a line for the runs that missed the target, one for those that diverged, one for the unfinished ones."""
    told: tuple[Status, ...] = ("missed", "diverged", "not finished")
    for status in told:
        seeds = row.with_status(status, stop)
        if seeds:
            reasons = {row.runs[seed].reason for seed in seeds if seed in row.runs}
            goal = f" {stop.goal}" if status == "missed" else ""
            why = f": {reasons.pop()}" if len(reasons) == 1 else ""
            yield f"{row.protocol}, {listed('seed', seeds)} {status}{goal}{why}"


def notes(comparison: Comparison) -> list[str]:
    """Return what has to be said of some runs, what the numbers are, and the verdict."""
    several = any(len(row.seeds) > 1 for row in comparison.rows)
    told = [f"{run} failed: {crash}" for run, crash in comparison.failures.items()]
    told += [line for row in comparison.rows for line in _shortfalls(row, comparison.stop)]
    if several:
        told.append(
            f"Times to {comparison.goal} and worker-hours: mean (least to most) over the runs that reached it. "
            "All other numbers: mean over all runs to their end; max: of all."
        )
    against = [in_words(comparison.rows[0], row, comparison.stop) for row in comparison.rows[1:]]
    told += [line for line in against if line]
    return [*told, f"All runs and this table are in {comparison.folder}.", comparison.verdict()]
