"""The table of a comparison, 80 columns wide: blocks one below the other, a row a protocol in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan, nan

from rich.console import Group
from rich.text import Text

from paceline.comparison.against import in_words
from paceline.comparison.result import STATUSES, Comparison, Row, Spread, Status
from paceline.recording.figures import Figures
from paceline.stop import Stop
from paceline.tables import Grid, paragraph
from paceline.wording import listed

MOST_METRICS = 2  # of those that the stop asks for, in 80 columns
NONE = "-"

Cell = Callable[[Row], str]


def grids(comparison: Comparison) -> list[Grid]:
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


def number(value: float | None) -> str:
    """Return three digits or more.

    >>> [number(value) for value in (1234.5, 56.78, 0.012345, 0, None)]
    ['1234', '56.8', '0.0123', '0', '-']
    """
    if value is None or isnan(value):
        return NONE
    return f"{value:.0f}" if value == 0 or value >= 99.95 else f"{value:#.3g}"


def whole(value: float | None) -> str:
    """Return a whole number as it is, and a mean of some as a number."""
    return f"{value:.0f}" if value is not None and float(value).is_integer() else number(value)


def spread(given: Spread) -> str:
    """Return the mean, the range, and of how many runs they are if it is not of all."""
    among = "" if given.runs == given.of else f"{given.runs} of {given.of}: "
    around = "" if given.runs == 1 else f" ({number(given.least)} to {number(given.most)})"
    return f"{among}{number(given.mean)}{around}"


def _to_target(comparison: Comparison) -> Mapping[str, Cell]:
    def worker_hours(row: Row) -> float | None:
        hours = comparison.worker_hours(row)
        return hours.mean if hours else None

    def cost(row: Row) -> float | None:
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


def _without_time(row: Row, stop: Stop) -> str:
    """Return how the runs of a row came out of which none reached the target."""
    seeds: dict[Status, int] = {status: len(row.with_status(status, stop)) for status in STATUSES}
    found = {status: amount for status, amount in seeds.items() if amount}
    return next(iter(found)) if len(found) == 1 else ", ".join(f"{amount} {status}" for status, amount in found.items())


def _mean(figure: Callable[[Figures], float]) -> Cell:
    return lambda row: number(row.mean(figure))


def _count(figure: Callable[[Figures], float]) -> Cell:
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


def _block(columns: Mapping[str, Cell], rows: Sequence[Row]) -> Grid:
    return Grid(["protocol", *columns], [[row.protocol, *(cell(row) for cell in columns.values())] for row in rows])


def _shortfalls(row: Row, stop: Stop) -> Iterator[str]:
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
