"""What a comparison has brought: a row a protocol, each with the figures of its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from paceline.recording.figures import Figures
from paceline.stop import Stop

if TYPE_CHECKING:
    from rich.console import Group

SECONDS_PER_HOUR = 3600


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
class Row:
    """The runs of one protocol.

    Attributes:
        protocol: as the user has written it.
        runs: the figures of those that have ended, by seed.
        missing: why there are no figures of the others, by seed.
    """

    protocol: str
    runs: Mapping[int, Figures]
    missing: Mapping[int, str] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """All seeds, with figures or without."""
        return sorted({*self.runs, *self.missing})

    def reaching(self, stop: Stop) -> list[Figures]:
        """Return the figures of the runs that reached the target."""
        return [figures for figures in self.runs.values() if figures.reached(stop)]

    def always_reaches(self, stop: Stop) -> bool:
        """Return whether there is no seed at which the target was not reached."""
        return bool(self.runs) and len(self.reaching(stop)) == len(self.seeds)

    def mean(self, number: Callable[[Figures], float]) -> float | None:
        """Return the mean of a number over all runs that have ended."""
        return mean(map(number, self.runs.values())) if self.runs else None


@dataclass(frozen=True)
class Comparison:
    """Several protocols on the same job and cluster.

    Attributes:
        rows: a protocol each, in the order that was asked for.
        stop: of every run.
        folder: with a folder a run, and the table.
        price: of a worker-hour, if one was given.
        interrupted: whether the user ended it before all runs had ended.
    """

    rows: Sequence[Row]
    stop: Stop
    folder: Path
    price: float | None = None
    interrupted: bool = False

    @property
    def goal(self) -> str:
        """What the time is the time to, as "loss 0.2"."""
        targets = [f"{name} {value:g}" for name, value in self.stop.targets.items()]
        return " or ".join(targets).replace("eval_loss", "evaluated loss") or "the end"

    @property
    def failures(self) -> dict[str, str]:
        """What went wrong in which run."""
        failed = {f"{row.protocol}, seed {seed}": why for row in self.rows for seed, why in row.missing.items()}
        for row in self.rows:
            for seed, figures in row.runs.items():
                if figures.failed:
                    failed[f"{row.protocol}, seed {seed}"] = figures.reason
        return failed

    def over_reaching(self, row: Row, number: Callable[[Figures], float]) -> Spread | None:
        """Return a number over those runs of a row that reached the target; None if none has."""
        values = [number(figures) for figures in row.reaching(self.stop)]
        if not values:
            return None
        return Spread(mean(values), min(values), max(values), len(values), len(row.seeds))

    def time_s(self, row: Row) -> Spread | None:
        """Return the seconds to the target."""
        return self.over_reaching(row, lambda figures: figures.time_s)

    def worker_hours(self, row: Row) -> Spread | None:
        """Return the worker-hours to the target."""
        return self.over_reaching(row, lambda figures: figures.worker_s / SECONDS_PER_HOUR)

    def speed_up(self, row: Row) -> float | None:
        """Return how many times faster than the first protocol; None unless both reach the target at every seed."""
        first, this = self.time_s(self.rows[0]), self.time_s(row)
        fair = self.rows[0].always_reaches(self.stop) and row.always_reaches(self.stop)
        return first.mean / this.mean if fair and first and this and this.mean else None

    def verdict(self) -> str:
        """Say which protocol reached the target first, and by how much."""
        if not self.stop.targets:
            return "Nothing was to be reached, so nobody won; give loss=, eval_loss= or accuracy= in the stop."
        always = [row for row in self.rows if row.always_reaches(self.stop)]
        times = sorted((spread.mean, row.protocol) for row in always if (spread := self.time_s(row)))
        if not times:
            return f"No protocol reached {self.goal} at every seed."
        (best_s, winner), *others = times
        behind = [f"{time_s / best_s:.1f} x faster than {name}" for time_s, name in others]
        behind += [f"while {row.protocol} did not always reach it" for row in self.rows if row not in always]
        return f"{winner} won: {', '.join([f'{self.goal} in {best_s:.2f} s', *behind])}."

    def table(self) -> Group:
        """Return the table for people, 80 columns wide."""
        from paceline.comparison.table import table

        return table(self)

    def text(self) -> str:
        """Return the table as plain text, 80 columns wide."""
        from paceline.comparison.table import as_text

        return as_text(self)

    def to_json(self) -> bytes:
        """Return all rows with every number of every run; what is not known, or not reached, is null."""
        import orjson

        content = {"goal": self.goal, "stop": str(self.stop), "rows": [self._plain(row) for row in self.rows]}
        return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    def _plain(self, row: Row) -> dict[str, Any]:
        worker_hours = self.worker_hours(row)
        return {
            "protocol": row.protocol,
            "seeds": len(row.seeds),
            "reached": len(row.reaching(self.stop)),
            "time_to_target_s": self.time_s(row),
            "speed_up": self.speed_up(row),
            "worker_hours_to_target": worker_hours,
            "cost_to_target": worker_hours and self.price and worker_hours.mean * self.price,
            "runs": [self._plain_run(seed, row.runs.get(seed), row.missing.get(seed)) for seed in row.seeds],
        }

    def _plain_run(self, seed: int, figures: Figures | None, missing: str | None) -> dict[str, Any]:
        if figures is None:
            return {"seed": seed, "reached": False, "time_to_target_s": None, "missing": missing}
        reached = figures.reached(self.stop)
        worker_hours = figures.worker_s / SECONDS_PER_HOUR
        return {
            "seed": seed,
            "reached": reached,
            "time_to_target_s": figures.time_s if reached else None,
            "worker_hours_to_target": worker_hours if reached else None,
            "cost_to_target": worker_hours * self.price if reached and self.price is not None else None,
            **figures.plain(),
        }
