"""Records of a run, one per event or command, as `events.jsonl` has them.

A record and the event or command that it is made of share the names of their fields. `of` makes a record, and `event`
makes the event again. Records of gradients, updates and decisions are in one file with their events and commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

from numpy.typing import NDArray

from paceline.core import events
from paceline.core.decision import DecisionMade as DecisionMade
from paceline.core.gradient import GradientArrived as GradientArrived
from paceline.core.update import StepMeasured as StepMeasured
from paceline.core.update import UpdateMade as UpdateMade

Column = NDArray[Any]


# In the records of events, `event_s` is the time of the event, and `now_s` the time at which the server had handled it,
# including an update that it completed.


@dataclass(frozen=True, slots=True)
class RunStarted:
    """Beginning of a run.

    Attributes:
        now_s: time of the record, in seconds since the run began; also in all other records.
        workers: number of workers.
        memory: memory that the versions may take, in text.
    """

    now_s: float
    workers: int
    memory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed:
    """Resumption of a run from a checkpoint; the work of its workers is lost.

    A simulated run without changes has no such record: it continues as if it had never stopped.

    Attributes:
        version: version of the checkpoint.
        workers: number of workers.
        stop_before: stop conditions before the restart.
        changes: settings that differ from the run before, in text; empty for none.
    """

    now_s: float
    version: int
    workers: int
    stop_before: str
    changes: str

    @property
    def event(self) -> events.Restarted:
        """Event of this record."""
        return events.Restarted(self.now_s, self.workers, self.stop_before)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkInterrupted:
    """Cancelled work of a worker, with the samples of its minibatches."""

    now_s: float
    worker: int
    draw: int
    version: int
    started_s: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkUnfinished:
    """Work that is never delivered: its worker is lost or excluded, or the run is over."""

    now_s: float
    worker: int
    draw: int
    version: int
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionEvaluated:
    """Evaluation of a version.

    Attributes:
        version: number of the version.
        metrics: value of each metric, by its name.
        published_s: time at which the version was made, in seconds; the time of its metrics.
    """

    now_s: float
    version: int
    published_s: float
    metrics: Mapping[str, float]
    event_s: float = nan

    @property
    def event(self) -> events.Evaluated:
        """Event of this record."""
        return events.Evaluated(self.event_s, self.version, dict(self.metrics))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """Worker that has joined or come back.

    Attributes:
        late_return: whether it had been declared lost and then delivered a gradient.
    """

    now_s: float
    worker: int
    late_return: bool = False
    event_s: float = nan

    @property
    def event(self) -> events.Joined | None:
        """Event of this record; None for a late return, whose event is an arrival."""
        return None if self.late_return else events.Joined(self.event_s, self.worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """Lost worker.

    Attributes:
        reason: why it counts as lost.
        silent: whether its timeout expired.
    """

    now_s: float
    worker: int
    reason: str
    silent: bool = False
    event_s: float = nan

    @property
    def event(self) -> events.Lost | None:
        """Event of this record; None for an expired timeout, whose event is a timer."""
        return None if self.silent else events.Lost(self.event_s, self.worker, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShared:
    """Worker that reads versions and writes gradients in the memory of the server on its host, so none is sent."""

    now_s: float
    worker: int
    event_s: float

    @property
    def event(self) -> events.SharesMemory:
        """Event of this record."""
        return events.SharesMemory(self.event_s, self.worker)


@dataclass(frozen=True, slots=True)
class TimerRang:
    """Timer of the coordinator."""

    now_s: float
    event_s: float

    @property
    def event(self) -> events.Timer:
        """Event of this record."""
        return events.Timer(self.event_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """End of a run.

    Attributes:
        outcome: word for the condition that ended the run.
        reason: reason in text.
        busy_s: worker-seconds of work.
        live_s: worker-seconds of live workers.
    """

    now_s: float
    outcome: events.Outcome
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
    | MemoryShared
    | TimerRang
    | RunEnded
)


def event_of(record: Record) -> events.Event | None:
    """Return the event that a record was made of; None for a record of a command."""
    event: events.Event | None = getattr(record, "event", None)
    return event
