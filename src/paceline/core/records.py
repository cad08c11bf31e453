"""Records of a run, one per event or command, as `events.jsonl` has them.

A record and the event or command that it is made of share the names of their fields. `of` makes a record, and `event`
makes the event again, so that a new field is added here and in `core.events` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

from numpy.typing import NDArray

from paceline.core import events

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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """Arrival of a gradient, and whether it was used. See `Arrival` for the fields that are its own.

    Attributes:
        version: version that the gradient was computed at.
        started_s: time at which the work was assigned, in seconds.
        staleness: staleness in versions.
        used: whether the gradient was accepted.
        reason: why it was dropped; empty if it was used.
        crossed_interrupt: whether its work was cancelled before; it counts as interrupted work.
        event_s: time of the event, in seconds; ``now_s`` is the time at which the server had handled it.
        compensations: formula and applied factor of each compensator.
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

    @classmethod
    def of(cls, arrival: events.Arrival, command: events.Accept | events.Drop, **facts: Any) -> GradientArrived:
        """Return the record of an arrival and the command that answered it.

        Args:
            arrival: the event.
            command: acceptance or drop.
            facts: fields that neither has.
        """
        reason = command.reason if isinstance(command, events.Drop) else ""
        return cls(
            used=isinstance(command, events.Accept),
            reason=reason,
            crossed_interrupt=reason == events.OLD_DRAW,
            event_s=arrival.now,
            **{
                **{name: getattr(arrival, name) for name in _OF_ARRIVAL},
                "compensations": [tuple(each) for each in arrival.compensations],
                **facts,
            },
        )

    @property
    def event(self) -> events.Arrival:
        """Event of this record."""
        fields = {name: getattr(self, name) for name in _OF_ARRIVAL}
        fields["compensations"] = tuple(events.Compensation(*each) for each in self.compensations)
        return events.Arrival(now=self.event_s, finite=self.reason != events.NOT_FINITE, **fields)


_OF_ARRIVAL = tuple(name for name in events.Arrival._fields if name in GradientArrived.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class WorkInterrupted:
    """Cancelled work of a worker, a minibatch of that many samples."""

    now_s: float
    worker: int
    draw: int
    version: int
    started_s: float
    samples: int


@dataclass(frozen=True, slots=True)
class WorkUnfinished:
    """Work that is never delivered: its worker is lost or excluded, or the run is over."""

    now_s: float
    worker: int
    draw: int
    version: int
    started_s: float


@dataclass(frozen=True, slots=True)
class UpdateMade:
    """Update made of k gradients.

    Attributes:
        version: number of the new version.
        k: number of gradients.
        workload: number of gradients accepted so far.
        samples: number of samples of these gradients.
        loss: mean loss of these gradients, each at its own version.
        learning_rate: learning rate of this step, of the first parameter group.
        staleness: mean staleness of these gradients, in versions.
        max_staleness: largest staleness of these gradients, in versions.
        reason: why the update was made at this time.
        busy_s: worker-seconds of work so far.
        live_s: worker-seconds of live workers so far.
        step_scale: factor of the compensators on the step.
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
    """Measured step of an update; see `Step`.

    Attributes:
        version: number of the new version.
    """

    now_s: float
    version: int
    squared_norm: float
    progress: float
    squared_step: float
    learning_rate: float
    next_learning_rate: float
    event_s: float = nan

    @property
    def step(self) -> events.Step:
        """Step of the event."""
        return events.Step(*(getattr(self, name) for name in events.Step._fields))

    @property
    def event(self) -> events.UpdateApplied:
        """Event of this record."""
        return events.UpdateApplied(self.event_s, self.version, self.step)


@dataclass(frozen=True, slots=True)
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
        return events.Evaluated(self.event_s, self.version, self.metrics)


@dataclass(frozen=True, slots=True)
class DecisionMade:
    """Decision, such as a change of protocol, quorum or membership."""

    now_s: float
    kind: str
    reason: str
    worker: int | None = None
    k: int | None = None

    @classmethod
    def of(cls, now_s: float, decision: events.Decision) -> DecisionMade:
        """Return the record of a decision."""
        return cls(now_s, *decision)


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class TimerRang:
    """Timer of the coordinator."""

    now_s: float
    event_s: float

    @property
    def event(self) -> events.Timer:
        """Event of this record."""
        return events.Timer(self.event_s)


@dataclass(frozen=True, slots=True)
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
    | TimerRang
    | RunEnded
)


def event_of(record: Record) -> events.Event | None:
    """Return the event that a record was made of; None for a record of a command."""
    event: events.Event | None = getattr(record, "event", None)
    return event
