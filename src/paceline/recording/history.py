"""History of a run: its records, totals, and columns by update or by second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any, ClassVar, Literal

import numpy as np

from paceline.core.gradient import mean_by_samples
from paceline.core.records import Column, GradientArrived, Record, RunEnded, UpdateMade, WorkInterrupted
from paceline.utils.representation import Representation
from paceline.utils.state_dict import Stateful

ROUNDING = 1e-9  # of shares; sums of times in another order differ by less


@dataclass(repr=False, kw_only=True)
class Totals(Representation, Stateful):
    """Totals of a whole run.

    Attributes:
        updates: number of updates.
        used: number of accepted gradients.
        applied: number of accepted gradients in updates; the last accepted ones may be in none.
        dropped: number of gradients that arrived and were not used.
        notices: number of them that were not sent, only told.
        interrupted: number of cancelled pieces of work.
        samples_used: number of samples of the used gradients.
        samples_dropped: number of samples of dropped gradients and cancelled work.
        staleness: number of used gradients by staleness.
        idle_share: share of the worker time without work, in [0, 1]; nan until the run has ended.
    """

    _saved = (
        "updates",
        "used",
        "applied",
        "dropped",
        "notices",
        "interrupted",
        "samples_used",
        "samples_dropped",
        "staleness",
        "idle_share",
    )
    _defaults: ClassVar[Mapping[str, Any]] = {"notices": 0}

    updates: int = 0
    used: int = 0
    applied: int = 0
    dropped: int = 0
    notices: int = 0
    interrupted: int = 0
    samples_used: int = 0
    samples_dropped: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    idle_share: float = nan

    def count(self, record: Record) -> None:
        """Count a record."""
        match record:
            case UpdateMade():
                self.updates += 1
                self.applied += record.k
            case GradientArrived(used=True):
                self.used += 1
                self.samples_used += record.samples
                self.staleness[record.staleness] += 1
            case GradientArrived(crossed_interrupt=False):  # the others were counted when they were interrupted
                self.dropped += 1
                self.notices += not isnan(record.unsent_s)
                self.samples_dropped += record.samples
            case WorkInterrupted():
                self.interrupted += 1
                self.samples_dropped += record.samples
            case RunEnded(live_s=live_s) if live_s:
                self.idle_share = idle_share(record.busy_s, live_s)

    @property
    def counts(self) -> dict[str, int]:
        """Counts of updates and gradients, by name."""
        return {name: getattr(self, name) for name in ("updates", "used", "dropped", "interrupted")}

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the used gradients, in versions."""
        return sum(tau * count for tau, count in self.staleness.items()) / max(1, self.staleness.total())

    @property
    def mean_k(self) -> float:
        """Mean number of gradients per update."""
        return self.applied / max(1, self.updates)

    def _facts(self) -> Mapping[str, object]:
        means = {"mean_k": self.mean_k, "mean_staleness": self.mean_staleness, "idle_share": self.idle_share}
        return {**self.counts, **means}


class History(Representation):
    """History of a run: all its records in order.

    Args:
        read: function that returns the records from the first to the last. A run with a folder keeps them there, not
            in memory.
        totals: totals of the records; computed from them if None.
    """

    def __init__(self, read: Callable[[], Iterable[Record]], totals: Totals | None = None) -> None:
        self._read = read
        self._totals = totals

    def __iter__(self) -> Iterator[Record]:
        return iter(self._read())

    @property
    def known_counts(self) -> Mapping[str, int]:
        """Counts of updates and gradients, if they are available without reading the records."""
        totals = self._totals
        return {} if totals is None else totals.counts

    def _facts(self) -> Mapping[str, object]:
        return self.known_counts or {"totals": "not read yet"}

    @property
    def records(self) -> list[Record]:
        """All records."""
        return list(self)

    @property
    def totals(self) -> Totals:
        """Totals of the records."""
        if self._totals is None:
            self._totals = Totals()
            for record in self:
                self._totals.count(record)
        return self._totals

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the records of one kind."""
        return [record for record in self if type(record) is kind]

    def columns(self, by: Literal["update", "second"] = "update", step_s: float = 1.0) -> dict[str, Column]:
        """Return columns of equal length.

        Args:
            by: "update" for one row per update, or "second" for one row every ``step_s`` seconds.
            step_s: seconds between rows, > 0.

        Returns:
            time_s, version, k, workload, samples_applied, samples_dropped, loss, learning_rate, staleness,
            used, dropped, interrupted (running totals) and idle_share (so far).
        """
        rows, end_s = self._rows()
        columns: dict[str, Column] = {
            name: np.array([row[i] for row in rows], dtype=kind) for i, (name, (kind, _)) in enumerate(_COLUMNS.items())
        }
        if by == "update" or not rows:
            return columns
        times = np.arange(0.0, end_s + step_s, step_s)
        latest = np.searchsorted(columns["time_s"], times, side="right") - 1
        reached = latest >= 0
        sampled = {name: column[latest[reached]] for name, column in columns.items()}
        sampled["time_s"] = times[reached]
        return sampled

    def to_pandas(self, by: Literal["update", "second"] = "update", step_s: float = 1.0) -> Any:
        """Return the columns as a pandas.DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.columns(by, step_s))

    def _rows(self) -> tuple[list[tuple[Any, ...]], float]:
        """Return one row per update, and the time of the last record."""
        rows: list[tuple[Any, ...]] = []
        so_far = Totals()
        now_s = 0.0
        for record in self:
            now_s = record.now_s
            so_far.count(record)
            if type(record) is UpdateMade:
                rows.append(tuple(value(record, so_far) for _, value in _COLUMNS.values()))
        return rows, now_s


_COLUMNS: Mapping[str, tuple[type, Callable[[UpdateMade, Totals], float]]] = {
    "time_s": (float, lambda update, so_far: update.now_s),
    "version": (int, lambda update, so_far: update.version),
    "k": (int, lambda update, so_far: update.k),
    "workload": (int, lambda update, so_far: update.workload),
    "samples_applied": (int, lambda update, so_far: so_far.samples_used),
    "samples_dropped": (int, lambda update, so_far: so_far.samples_dropped),
    "loss": (float, lambda update, so_far: update.loss),
    "learning_rate": (float, lambda update, so_far: update.learning_rate),
    "staleness": (float, lambda update, so_far: update.staleness),
    "used": (int, lambda update, so_far: so_far.used),
    "dropped": (int, lambda update, so_far: so_far.dropped),
    "interrupted": (int, lambda update, so_far: so_far.interrupted),
    "idle_share": (float, lambda update, so_far: idle_share(update.busy_s, update.live_s)),
}


def idle_share(busy_s: float, live_s: float) -> float:
    """Return the share of worker-seconds without work, in [0, 1]; nan if there are none.

    >>> idle_share(busy_s=3.0, live_s=4.0), idle_share(busy_s=0.3, live_s=0.1 + 0.2)
    (0.25, 0.0)
    """
    share = 1 - busy_s / live_s if live_s else nan
    return 0.0 if abs(share) < ROUNDING else share


def mean_loss(losses: Sequence[float], samples: Sequence[int] | None = None) -> float:
    """Return the mean of the losses that are not nan, weighed by samples if these are given; nan if there is none."""
    counts = samples or [1] * len(losses)
    known = [(loss, count) for loss, count in zip(losses, counts, strict=True) if not isnan(loss)]
    return mean_by_samples(*zip(*known, strict=True)) if known else nan
