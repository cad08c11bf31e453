"""Result of a comparison: statistics, verdict and table, 80 columns wide, with one row per protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Group
from rich.text import Text

from paceline.core.stop import Stop
from paceline.errors import RunError
from paceline.experiments.comparison_row import STATUSES, ComparisonRow, Status
from paceline.experiments.paired_differences import PairedDifference, difference_sentence, differences
from paceline.experiments.runner.ending import Crash, describe_crashes
from paceline.recording.run_stats import RunStats
from paceline.utils.files import in_unicode
from paceline.utils.representation import TableRepresentation
from paceline.utils.text_table import NONE, TextTable, number, paragraph, whole
from paceline.utils.wording import counted, listed

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and range of a number over several runs.

    Attributes:
        mean: mean over the runs that have the number.
        least: smallest value.
        most: largest value.
        runs: number of runs that have the number, >= 1.
        of: number of all runs, >= 1.
    """

    mean: float
    least: float
    most: float
    runs: int
    of: int


@dataclass(frozen=True, repr=False, kw_only=True)
class Comparison(TableRepresentation):
    """Comparison of several protocols on one job and cluster; prints as a table of 80 columns.

    Attributes:
        rows: one row per protocol, in the given order.
        stop: stop of every run.
        folder: folder with the table and a folder per run.
        price: price of a worker-hour, >= 0; None if not given.
        interrupted: whether the user interrupted the comparison before all runs had ended.
    """

    rows: Sequence[ComparisonRow]
    stop: Stop
    folder: Path
    price: float | None = None
    interrupted: bool = False

    @property
    def goal(self) -> str:
        """Target of the runs, for example "loss 0.2"."""
        return self.stop.goal

    @property
    def failures(self) -> dict[str, Crash]:
        """Reasons of crashed runs, by protocol and seed; a run that missed the target or diverged has not crashed."""
        return {f"{row.protocol}, seed {seed}": crash for row in self.rows for seed, crash in row.crashes.items()}

    def over_reaching(self, row: ComparisonRow, number: Callable[[RunStats], float]) -> Spread | None:
        """Return the spread of a number over the runs of a row that reached the target; None without any."""
        values = [number(stats) for stats in row.reaching(self.stop)]
        if not values:
            return None
        return Spread(mean=mean(values), least=min(values), most=max(values), runs=len(values), of=len(row.seeds))

    def time_s(self, row: ComparisonRow) -> Spread | None:
        """Return the spread of the seconds to the target."""
        return self.over_reaching(row, lambda stats: stats.time_s)

    def worker_hours(self, row: ComparisonRow) -> Spread | None:
        """Return the spread of the worker-hours to the target."""
        return self.over_reaching(row, lambda stats: stats.worker_s / SECONDS_PER_HOUR)

    def cost(self, row: ComparisonRow) -> float | None:
        """Return the mean price of the worker-hours to the target; None without a price."""
        hours = self.worker_hours(row)
        return None if hours is None or self.price is None else hours.mean * self.price

    def speed_up(self, row: ComparisonRow) -> float | None:
        """Return the speed-up over the first protocol; None unless both reach the target at every seed."""
        first, this = self.time_s(self.rows[0]), self.time_s(row)
        fair = self.rows[0].always_reaches(self.stop) and row.always_reaches(self.stop)
        return first.mean / this.mean if fair and first and this and this.mean else None

    def against_first(self, row: ComparisonRow) -> list[PairedDifference]:
        """Return the differences from the first protocol: 95 % intervals paired by seed, for two seeds or more."""
        return differences(self.rows[0], row, self.stop)

    def verdict(self) -> str:
        """Return a sentence on which protocol reached the target first, and by how much."""
        if not self.stop.targets:
            return "The stop has no target, so there is no winner; give loss=, eval_loss=, accuracy= or metric=."
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
        """Return the table with bold headings and verdict, for a rich console."""
        blocks: list[Text] = []
        for grid in self._grids():
            head, body = grid.text()
            blocks += [Text(head, style="bold", no_wrap=True), Text(f"{body}\n", no_wrap=True)]
        *others, verdict = map(paragraph, self._notes())
        blocks += [*map(Text, others), Text(verdict, style="bold")]
        return Group(*blocks)

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
        blocks = (_to_target(self), _WORK, _samples(self))
        return [_block(columns, self.rows) for columns in blocks]

    def _notes(self) -> list[str]:
        """Return the notes: runs without a result, the meaning of the numbers, and the verdict."""
        lines = [f"{run} failed: {crash}" for run, crash in self.failures.items()]
        lines += [line for row in self.rows for line in _shortfalls(row, self.stop)]
        if any(len(row.seeds) > 1 for row in self.rows):
            lines.append(
                f"Times to {self.goal} and worker-hours: mean (least to most) over the runs that reached it. "
                "All other numbers: mean over all runs to their end; max: largest of all."
            )
        against = [difference_sentence(self.rows[0], row, self.stop) for row in self.rows[1:]]
        lines += [line for line in against if line]
        return [*lines, f"All runs and this table are in {self.folder}.", self.verdict()]

    def to_json(self) -> bytes:
        """Return all rows with every number of every run; an unknown number, or one that was not reached, is null."""
        import orjson

        content = {
            "folder": in_unicode(str(self.folder)),
            "goal": self.goal,
            "stop": str(self.stop),
            "rows": [self._plain(row) for row in self.rows],
        }
        return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    def _plain(self, row: ComparisonRow) -> dict[str, Any]:
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
            "worker_hours_to_target": self.worker_hours(row),
            "cost_to_target": self.cost(row),
            "runs": [self._plain_run(row, seed) for seed in row.seeds],
        }

    def _plain_run(self, row: ComparisonRow, seed: int) -> dict[str, Any]:
        status, crash, stats = row.status(seed, self.stop), row.crashes.get(seed), row.runs.get(seed)
        reached = status == "reached"
        common = {"seed": seed, "status": status, "reached": reached, "error": crash and crash.message}
        if stats is None:
            return {**common, "error_file": crash and crash.file and str(crash.file), "time_to_target_s": None}
        worker_hours = stats.worker_s / SECONDS_PER_HOUR
        return {
            **common,
            "time_to_target_s": stats.time_s if reached else None,
            "worker_hours_to_target": worker_hours if reached else None,
            "cost_to_target": worker_hours * self.price if reached and self.price is not None else None,
            **stats.plain(),
        }


class FailedRunsError(RunError):
    """Some runs of a comparison crashed; the results of the others are in `comparison`."""

    def __init__(self, comparison: Comparison) -> None:
        runs = sum(len(row.seeds) for row in comparison.rows)
        super().__init__(describe_crashes(comparison.failures, runs, comparison.folder))
        self.comparison = comparison


MOST_METRICS = 2  # metrics of the stop that fit into 80 columns

Cell = Callable[[ComparisonRow], str]


def spread(given: Spread) -> str:
    """Return the mean, the range, and the number of runs if it is not that of all, as text."""
    among = "" if given.runs == given.of else f"{given.runs} of {given.of}: "
    around = "" if given.runs == 1 else f" ({number(given.least)} to {number(given.most)})"
    return f"{among}{number(given.mean)}{around}"


def _to_target(comparison: Comparison) -> Mapping[str, Cell]:
    columns: dict[str, Cell] = {
        f"seconds to\n{comparison.goal}": lambda row: (
            spread(times) if (times := comparison.time_s(row)) else _without_time(row, comparison.stop)
        ),
        "speed-up over\nthe first": lambda row: number(comparison.speed_up(row)),
        "worker\nhours": lambda row: number(hours.mean if (hours := comparison.worker_hours(row)) else None),
    }
    return columns if comparison.price is None else {**columns, "\ncost": lambda row: number(comparison.cost(row))}


def _without_time(row: ComparisonRow, stop: Stop) -> str:
    """Return the statuses of the runs of a row of which none reached the target."""
    seeds: dict[Status, int] = {status: len(row.with_status(status, stop)) for status in STATUSES}
    found = {status: amount for status, amount in seeds.items() if amount}
    return next(iter(found)) if len(found) == 1 else ", ".join(f"{amount} {status}" for status, amount in found.items())


def _mean(figure: Callable[[RunStats], float]) -> Cell:
    return lambda row: number(row.mean(figure))


def _count(figure: Callable[[RunStats], float]) -> Cell:
    return lambda row: whole(row.mean(figure))


_WORK: Mapping[str, Cell] = {
    "\nupdates": _count(lambda stats: stats.updates),
    "mean\nk": _mean(lambda stats: stats.mean_k),
    "gradients\nused": _count(lambda stats: stats.used),
    "\ndropped": _count(lambda stats: stats.dropped),
    "\ninterrupted": _count(lambda stats: stats.interrupted),
    "idle\nshare": lambda row: _share(row.mean(lambda stats: stats.idle_share)),
}


def _samples(comparison: Comparison) -> Mapping[str, Cell]:
    columns: dict[str, Cell] = {
        "samples\napplied": _count(lambda stats: stats.samples_applied),
        "\ndropped": _count(lambda stats: stats.samples_dropped),
        "staleness\nmean": _mean(lambda stats: stats.mean_staleness),
        "\nmax": lambda row: str(max((stats.max_staleness for stats in row.runs.values()), default=NONE)),
        "training\nloss": _mean(lambda stats: stats.loss),
    }
    if any("accuracy" in stats.metrics for row in comparison.rows for stats in row.runs.values()):
        columns["test\naccuracy"] = _metric("accuracy")
    metrics = [target.metric for target in comparison.stop.evaluated if target.metric != "accuracy"]
    return columns | {f"test\n{name}": _metric(name) for name in metrics[:MOST_METRICS]}


def _metric(name: str) -> Cell:
    return _mean(lambda stats: stats.metrics.get(name, nan))


def _share(value: float | None) -> str:
    return NONE if value is None or isnan(value) else f"{round(100 * value)}%"


def _block(columns: Mapping[str, Cell], rows: Sequence[ComparisonRow]) -> TextTable:
    return TextTable(
        ["protocol", *columns], [[row.protocol, *(cell(row) for cell in columns.values())] for row in rows]
    )


def _shortfalls(row: ComparisonRow, stop: Stop) -> Iterator[str]:
    """Yield a line for the runs that missed the target, one for the diverged ones, and one for the unfinished ones."""
    statuses: tuple[Status, ...] = ("missed", "diverged", "not finished")
    for status in statuses:
        seeds = row.with_status(status, stop)
        if seeds:
            reasons = {row.runs[seed].reason for seed in seeds if seed in row.runs}
            goal = f" {stop.goal}" if status == "missed" else ""
            why = f": {reasons.pop()}" if len(reasons) == 1 else ""
            yield f"{row.protocol}, {listed('seed', seeds)} {status}{goal}{why}"
