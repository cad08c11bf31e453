"""The contract of a controller: numbers in, decisions with their reasons out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from paceline.core.events import Arrival, Step
from paceline.policies.learning_rate import LRScaling
from paceline.protocols.protocol import Phase, Protocol
from paceline.utils.argument_types import checked_types

Asked = Literal["open", "arrival", "timer", "end"]

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Observation:
    """What a controller sees when it is asked.

    Attributes:
        asked: at the "open" of an update, at an "arrival", at a "timer" that a controller asked for, or at the "end" of
            its phase, if another one follows.
        now: seconds since the run began.
        version: updates made so far.
        opened_s: when the open update was opened.
        live: how many workers take part.
        workers: which they are, when an update is opened; else empty.
        aside: who is set aside and still there, likewise.
        held: gradients accepted for the open update.
        quorum: gradients it waits for; inf when it waits for every worker.
        protocol: the protocol in force.
        workload: gradients applied so far.
        learning_rate: how it follows the number of gradients.
        schedule_scale: by which a schedule multiplies it besides.
        made_of: gradients that the latest update was made of.
        step: of that update, when the next one is opened, if a controller reads steps.
        arrival: what has just arrived, else None; also of a worker that was set aside, if it is a probe.
        busy_s: seconds that its worker has spent on it, waiting for others not.
        staleness: of that arrival.
        accepted: whether it entered the update.
    """

    asked: Asked
    now: float
    version: int
    opened_s: float
    live: int
    held: int
    quorum: float
    protocol: Protocol
    workload: int
    learning_rate: LRScaling
    schedule_scale: float = 1.0
    made_of: int = 0
    workers: Sequence[int] = ()
    aside: Sequence[int] = ()
    step: Step | None = None
    arrival: Arrival | None = None
    busy_s: float = 0.0
    staleness: int = 0
    accepted: bool = False


@checked_types
class SetQuorum(NamedTuple):
    """Wait for k gradients in the open update."""

    k: int
    reason: str


@checked_types
class CloseUpdate(NamedTuple):
    """Make the update now of what is held."""

    reason: str


@checked_types
class ChangeProtocol(NamedTuple):
    """Go on with another protocol, under the same controllers.

    Attributes:
        counts: whether what is made under it counts towards the end of the phase.
    """

    protocol: Protocol
    reason: str
    counts: bool = True


@checked_types
class Exclude(NamedTuple):
    """Take a live worker out; it stays connected and idle. The last one is kept."""

    worker: int
    reason: str


@checked_types
class Readmit(NamedTuple):
    """Let a worker that was set aside take part again."""

    worker: int
    reason: str


@checked_types
class Probe(NamedTuple):
    """Give a worker that was set aside a minibatch, to hear how long it takes; its gradient is not used."""

    worker: int


@checked_types
class ReplaceWorker(NamedTuple):
    """Give a worker up and take another one in its place, where the engine can start one."""

    worker: int


@checked_types
class CallAgainAt(NamedTuple):
    """Ask again at this moment."""

    at_s: float


@checked_types
class Note(NamedTuple):
    """Put something on record, and change nothing.

    Attributes:
        kind: one word for all remarks of this sort.
        worker: whom it is about, if anybody.
    """

    kind: str
    reason: str
    worker: int | None = None


Action = SetQuorum | CloseUpdate | ChangeProtocol | Exclude | Readmit | Probe | ReplaceWorker | CallAgainAt | Note

# Where several controllers speak: what was found, before membership, before protocol, before quorum.
PRECEDENCE: tuple[type[Action], ...] = (
    Note,
    Exclude,
    Readmit,
    Probe,
    ReplaceWorker,
    ChangeProtocol,
    SetQuorum,
    CloseUpdate,
    CallAgainAt,
)


class Controller(ABC, Generic[State]):
    """Changes the knobs while training runs.

    A controller itself never changes: its state goes in and comes out, so that one controller can serve many
    runs, and a run can be stopped and continued.

    Attributes:
        reads: what of a moment it needs: "times" are always there; "losses" only where gradients are computed;
            "steps" are measured only where a controller reads them, and come with losses.
    """

    reads: ClassVar[Literal["times", "losses", "steps"]] = "times"

    def __repr__(self) -> str:
        """Return the controller as its call, the same in every process: it tells one plan from another."""
        knobs = (f"{name}={getattr(knob, '__qualname__', None) or repr(knob)}" for name, knob in vars(self).items())
        return f"{type(self).__qualname__}({', '.join(knobs)})"

    @abstractmethod
    def begin(self, n: int) -> State:
        """Return the state at the beginning of a phase with n workers."""

    @abstractmethod
    def decide(self, state: State, moment: Observation) -> tuple[State, Sequence[Action]]:
        """Answer with the next state and what to do, possibly nothing."""

    def added_to(self, phase: Phase) -> Phase:
        """Return the phase under this controller too."""
        return replace(phase, controllers=(*phase.controllers, self), name=f"{phase.title} + {self}")

    def check(self, protocol: Protocol, n: int) -> None:
        """Refuse a protocol or a number of workers that it cannot control; warn where it makes no difference."""

    def state_dict(self, state: State) -> Any:
        """Return the state as a checkpoint can hold it: numbers, text, lists, tuples, sets, dicts, arrays."""
        return state

    def load_state_dict(self, saved: Any) -> State:
        """Return the state that `state_dict` made this of."""
        state: State = saved
        return state
