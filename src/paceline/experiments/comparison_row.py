"""Runs of one protocol in a comparison, one for each seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Literal, get_args

from paceline.core.stop import Stop
from paceline.experiments.runner.ending import Crash
from paceline.recording.run_stats import RunStats
from paceline.utils.wording import listed

Status = Literal["reached", "missed", "diverged", "failed", "not finished"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """Runs of one protocol.

    Attributes:
        protocol: name of the protocol as given by the user.
        runs: statistics of the finished runs, by seed.
        crashes: reasons of crashed runs, by seed.
        unfinished: seeds of the runs that did not finish, because the user interrupted the comparison.
    """

    protocol: str
    runs: Mapping[int, RunStats]
    crashes: Mapping[int, Crash] = field(default_factory=dict)
    unfinished: Sequence[int] = ()

    @property
    def seeds(self) -> list[int]:
        """All seeds, with statistics or without."""
        return sorted({*self.runs, *self.crashes, *self.unfinished})

    def status(self, seed: int, stop: Stop) -> Status:
        """Return the status of the run of a seed."""
        if seed in self.crashes:
            return "failed"
        if seed in self.unfinished:
            return "not finished"
        stats = self.runs[seed]
        return "reached" if stats.reached(stop) else "diverged" if stats.diverged else "missed"

    def with_status(self, status: Status, stop: Stop) -> list[int]:
        """Return the seeds of the runs with a status."""
        return [seed for seed in self.seeds if self.status(seed, stop) == status]

    def shortfall(self, stop: Stop) -> str:
        """Return a text on the runs that did not reach the target, for example "missed it with seed 1"."""
        parts = []
        for status in STATUSES[1:]:
            seeds = self.with_status(status, stop)
            if seeds:
                with_seeds = "with every seed" if seeds == self.seeds else f"with {listed('seed', seeds)}"
                parts.append(f"{'missed it' if status == 'missed' else status} {with_seeds}")
        return " and ".join(parts)

    def reaching(self, stop: Stop) -> list[RunStats]:
        """Return the statistics of the runs that reached the target."""
        return [stats for stats in self.runs.values() if stats.reached(stop)]

    def always_reaches(self, stop: Stop) -> bool:
        """Return whether the runs of all seeds reached the target."""
        return bool(self.runs) and len(self.reaching(stop)) == len(self.seeds)

    def numbers(self, number: Callable[[RunStats], float]) -> dict[int, float]:
        """Return a number of each finished run, by seed, without diverged runs."""
        return {seed: number(stats) for seed, stats in self.runs.items() if not stats.diverged}

    def mean(self, number: Callable[[RunStats], float]) -> float | None:
        """Return the mean of a number over all finished runs; None without any."""
        return mean(map(number, self.runs.values())) if self.runs else None
