"""What happened: one record an event, and columns of them by update and by second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.events import Outcome, Step
from paceline.shown import Shown

Column = NDArray[Any]


# In the records of events, `now_s` is when the server was done with the event, with the update that it may have
# completed, and `event_s` is when the coordinator heard of it.


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The run has begun.

    Attributes:
        memory: how much the versions may take, in words.
    """

    now_s: float
    workers: int
    memory: str


@dataclass(frozen=True, slots=True)
class RunResumed:
    """A run that had ended goes on from a checkpoint, and what its workers were computing then is lost.

    A simulated run that nothing was changed in leaves no such record: it goes on as if it had never stopped.

    Attributes:
        stop_before: the conditions that would have ended it before.
        changes: what differs from the run before, in words; empty for nothing.
    """

    now_s: float
    version: int
    workers: int
    stop_before: str
    changes: str


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """A gradient arrived, and was used or dropped; one that crossed its interrupt counts as interrupted work.

    Attributes:
        step_scale: that compensators gave it.
        compensations: formula and applied factor of each.
        sum_s: seconds of the sum that it is a part of, 0 if none was made yet; nan with a server.
        left_over_s: seconds of the iteration besides, of real ranks without a server.
    """

    now_s: float
    worker: int
    draw: int
    version: int
    started_s: float
    staleness: int
    used: bool
    reason: str
    loss: float
    samples: int
    squared_norm: float
    pull_s: float
    compute_s: float
    push_s: float
    crossed_interrupt: bool = False
    event_s: float = nan
    variance: float = nan
    step_scale: float = 1.0
    compensations: Sequence[tuple[str, float]] = ()
    sum_s: float = nan
    left_over_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkInterrupted:
    """A worker was told to abandon its work, a minibatch of that many samples."""

    now_s: float
    worker: int
    draw: int
    version: int
    started_s: float
    samples: int


@dataclass(frozen=True, slots=True)
class WorkUnfinished:
    """Work that will never be delivered: its worker is lost or set aside, or the run is over."""

    now_s: float
    worker: int
    draw: int
    version: int
    started_s: float


@dataclass(frozen=True, slots=True)
class UpdateMade:
    """An update was made of k gradients.

    Attributes:
        loss: mean over those gradients, each at its own version.
        learning_rate: that the optimizer stepped with, of its first parameter group.
        staleness: mean over those gradients.
        busy_s: worker-seconds spent so far on work that is finished or abandoned.
        live_s: worker-seconds so far that workers were there.
        step_scale: by which compensators have changed the step's length besides.
    """

    now_s: float
    version: int
    k: int
    workload: int
    samples: int
    loss: float
    learning_rate: float
    staleness: float
    max_staleness: int
    reason: str
    busy_s: float
    live_s: float
    step_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class StepMeasured:
    """How far an update has moved the parameters, measured because somebody reads it; see `events.Step`."""

    now_s: float
    version: int
    squared_norm: float
    progress: float
    squared_step: float
    learning_rate: float
    next_learning_rate: float
    event_s: float = nan

    @property
    def step(self) -> Step:
        """The step as the coordinator was told of it."""
        return Step(self.squared_norm, self.progress, self.squared_step, self.learning_rate, self.next_learning_rate)


@dataclass(frozen=True, slots=True)
class VersionEvaluated:
    """A version was measured on the evaluation data.

    Attributes:
        published_s: when the version was made, which is the time that its metrics count for.
    """

    now_s: float
    version: int
    published_s: float
    metrics: Mapping[str, float]
    event_s: float = nan


@dataclass(frozen=True, slots=True)
class DecisionMade:
    """A protocol, a quorum or a membership was changed.

    Attributes:
        worker: whom it is about, if anybody.
        k: the quorum that was chosen, if one was.
    """

    now_s: float
    kind: str
    reason: str
    worker: int | None = None
    k: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker came, or came back.

    Attributes:
        late_return: whether it had been declared lost and then handed in a gradient after all.
    """

    now_s: float
    worker: int
    late_return: bool = False
    event_s: float = nan


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone.

    Attributes:
        silent: whether it was declared lost because nothing was heard of it.
    """

    now_s: float
    worker: int
    reason: str
    silent: bool = False
    event_s: float = nan


@dataclass(frozen=True, slots=True)
class TimerRang:
    """A moment came that the coordinator had asked for."""

    now_s: float
    event_s: float


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run is over.

    Attributes:
        busy_s: worker-seconds spent on work.
        live_s: worker-seconds that workers were there.
    """

    now_s: float
    outcome: Outcome
    reason: str
    busy_s: float
    live_s: float


Record = (
    RunStarted
    | RunResumed
    | GradientArrived
    | WorkInterrupted
    | WorkUnfinished
    | UpdateMade
    | StepMeasured
    | VersionEvaluated
    | DecisionMade
    | WorkerJoined
    | WorkerLost
    | TimerRang
    | RunEnded
)


@dataclass(repr=False)
class Totals(Shown):
    """Counts and times of a whole run.

    Attributes:
        used: gradients that were accepted.
        applied: those of them that an update was made of; the last ones may still have waited for theirs.
        dropped: gradients that arrived and were not used.
        interrupted: pieces of work that were abandoned.
        samples_used: in the used gradients.
        samples_dropped: in the dropped ones and in abandoned work.
        staleness: how many used gradients had which staleness.
        idle_share: worker time spent waiting for work, of all worker time.
    """

    updates: int = 0
    used: int = 0
    applied: int = 0
    dropped: int = 0
    interrupted: int = 0
    samples_used: int = 0
    samples_dropped: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    idle_share: float = nan

    def count(self, record: Record) -> None:
        """Take in one record."""
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
                self.samples_dropped += record.samples
            case WorkInterrupted():
                self.interrupted += 1
                self.samples_dropped += record.samples
            case RunEnded(live_s=live_s) if live_s:
                self.idle_share = 1 - record.busy_s / live_s

    @property
    def mean_staleness(self) -> float:
        """Mean over the used gradients."""
        return sum(tau * count for tau, count in self.staleness.items()) / max(1, self.staleness.total())

    @property
    def mean_k(self) -> float:
        """Gradients per update."""
        return self.applied / max(1, self.updates)

    def _facts(self) -> Mapping[str, object]:
        counts = {"updates": self.updates, "used": self.used, "dropped": self.dropped, "interrupted": self.interrupted}
        return {**counts, "mean_k": self.mean_k, "mean_staleness": self.mean_staleness, "idle_share": self.idle_share}


class History(Shown):
    """Everything that happened in a run, in order.

    Args:
        read: gives the records from the first to the last; a run with a folder keeps them there, not in memory.
        totals: their sums; made from the records if not given.
    """

    def __init__(self, read: Callable[[], Iterable[Record]], totals: Totals | None = None) -> None:
        self._read = read
        self._totals = totals

    def __iter__(self) -> Iterator[Record]:
        return iter(self._read())

    @property
    def known_counts(self) -> Mapping[str, int]:
        """Updates, and gradients by what became of them, as far as they are counted without reading the records."""
        totals = self._totals
        if totals is None:
            return {}
        return {
            "updates": totals.updates,
            "used": totals.used,
            "dropped": totals.dropped,
            "interrupted": totals.interrupted,
        }

    def _facts(self) -> Mapping[str, object]:
        return self.known_counts or {"totals": "not read yet"}

    @property
    def records(self) -> list[Record]:
        """All records, one an event."""
        return list(self)

    @property
    def totals(self) -> Totals:
        """Sums over the records."""
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
            by: one row an update, or one every `step_s` seconds with the state at that moment.
            step_s: seconds between rows, > 0.

        Returns:
            time_s, version, k, workload, samples_applied, samples_dropped, loss, learning_rate, staleness,
            used, dropped, interrupted (running totals) and idle_share (so far).
        """
        rows, end_s = self._rows()
        columns: dict[str, Column] = {
            name: np.array([row[i] for row in rows], dtype=kind) for i, (name, kind) in enumerate(_COLUMNS.items())
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
        """Return a row an update, and the time of the last record."""
        rows: list[tuple[Any, ...]] = []
        so_far = Totals()
        now_s = 0.0
        for record in self:
            now_s = record.now_s
            so_far.count(record)
            if type(record) is UpdateMade:
                rows.append(
                    (
                        record.now_s,
                        record.version,
                        record.k,
                        record.workload,
                        so_far.samples_used,
                        so_far.samples_dropped,
                        record.loss,
                        record.learning_rate,
                        record.staleness,
                        so_far.used,
                        so_far.dropped,
                        so_far.interrupted,
                        1 - record.busy_s / record.live_s if record.live_s else nan,
                    )
                )
        return rows, now_s


_COLUMNS: dict[str, type] = {
    "time_s": float,
    "version": int,
    "k": int,
    "workload": int,
    "samples_applied": int,
    "samples_dropped": int,
    "loss": float,
    "learning_rate": float,
    "staleness": float,
    "used": int,
    "dropped": int,
    "interrupted": int,
    "idle_share": float,
}


def mean_loss(losses: Sequence[float]) -> float:
    """Return the mean of the losses that are known, nan if none is."""
    known = [loss for loss in losses if not isnan(loss)]
    return sum(known) / len(known) if known else nan
