"""What happened: one record an event, and columns of them by update and by second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

from numpy.typing import NDArray

from paceline.core.events import Outcome, Step

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
