"""Interface of controllers: observations in, actions with their reasons out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast, get_args

from paceline.core.events import Arrival, Step
from paceline.policies.estimators.noise.critical_batch import NoiseEstimate
from paceline.policies.learning_rate import LRScaling
from paceline.policies.noise_rule import NoiseScaling
from paceline.protocols.additions import ControllerPart
from paceline.protocols.protocol import Phase, Protocol
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import short_repr
from paceline.utils.state_dict import Stateful

Trigger = Literal["open", "arrival", "timer", "end"]

State = TypeVar("State")


class Work(NamedTuple):
    """Work of a worker that has not arrived.

    Attributes:
        worker: number of the worker.
        version: version that it was begun at.
        elapsed_s: seconds since its assignment; until it was cancelled, for cancelled work.
        share: samples of it over those of a whole minibatch.
    """

    worker: int
    version: int
    elapsed_s: float
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Observation: the state of the run when the coordinator calls a controller.

    Attributes:
        trigger: reason of the call: the "open" of an update, an "arrival", a "timer" that a controller set, or the
            "end" of the phase, if another phase follows.
        now: time of the call, seconds since the run began.
        version: number of updates so far, >= 0.
        opened_s: time at which the open update was opened, seconds since the run began.
        live: number of workers that take part.
        workers: ids of these workers when an update is opened; else empty.
        excluded: ids of the connected workers that are excluded, when an update is opened; else empty.
        held: number of gradients accepted for the open update.
        quorum: number of gradients that the update waits for; inf if it waits for every worker.
        protocol: protocol in force.
        workload: number of gradients applied so far.
        learning_rate: rule by which the learning rate follows the number of gradients.
        schedule_scale: factor of the schedule on the learning rate.
        update_size: number of gradients in the latest update.
        step: measured step of the latest update, when an update is opened and a controller reads steps; else None.
        arrival: gradient that has just arrived, also the probe of an excluded worker; else None.
        busy_s: seconds that its worker spent on it, without waiting for other workers.
        trip_s: seconds from the assignment of its work to its arrival.
        share: samples of its work over those of a whole minibatch.
        batch_size: samples of a whole minibatch; None where only times are simulated.
        staleness: staleness of the arrival, versions, >= 0.
        accepted: whether the arrival entered the open update.
        interrupted: work that was cancelled since the update before was opened, when an update is opened.
        leads: gradients by which each worker is ahead of the slowest, by worker, when an update is opened; empty under
            a protocol without a bound.
        in_flight: work of the busy workers, if a controller reads it, see `Controller.reads_work`.
        noise: estimates of the learning-rate rule "noise"; None under another rule.
        price: price of staleness of the protocol in force, >= 1; 1 without that rule.
        has_risen: whether that rule has lowered the rate since the latest update, because the loss had risen.
    """

    trigger: Trigger
    now: float
    version: int
    opened_s: float
    live: int
    held: int
    quorum: float
    protocol: Protocol
    workload: int
    learning_rate: LRScaling | NoiseScaling
    schedule_scale: float = 1.0
    update_size: int = 0
    workers: Sequence[int] = ()
    excluded: Sequence[int] = ()
    step: Step | None = None
    arrival: Arrival | None = None
    busy_s: float = 0.0
    trip_s: float = 0.0
    share: float = 1.0
    batch_size: int | None = None
    staleness: int = 0
    accepted: bool = False
    interrupted: Sequence[Work] = ()
    leads: Mapping[int, int] = field(default_factory=dict)
    in_flight: Sequence[Work] = ()
    noise: NoiseEstimate | None = None
    price: float = 1.0
    has_risen: bool = False


@checked_types
class SetQuorum(NamedTuple):
    """Set the quorum of the open update to k gradients, k >= 1.

    Attributes:
        k: number of gradients, >= 1.
        reason: text for the log.
    """

    k: int
    reason: str


@checked_types
class SetLead(NamedTuple):
    """Set how many gradients a worker may be ahead of the slowest one, under a protocol that bounds it.

    Attributes:
        lead: largest lead, >= 0.
        reason: text for the log.
    """

    lead: int
    reason: str


@checked_types
class LeaseRule(NamedTuple):
    """Leases that workers take after the first ones of an update, until each of its samples is used.

    Attributes:
        minibatches: number of minibatches of the update, >= 1.
        piece: samples of a lease after the first one, >= 1.
        repeats: whether a worker that finds no sample left repeats a lease that is under way.
    """

    minibatches: int
    piece: int
    repeats: bool


@checked_types
class SetShares(NamedTuple):
    """Cut the minibatches of the update that opens, so that each worker computes its share of their samples.

    Attributes:
        shares: samples of each live worker, >= 1; their sum is that of a whole minibatch for each, or less with leases.
        batch_size: samples of a whole minibatch, >= 1.
        reason: text for the log; empty for shares that stay.
        leases: rule of the leases that follow these shares; None if each worker has one share.
    """

    shares: Mapping[int, int]
    batch_size: int
    reason: str = ""
    leases: LeaseRule | None = None


@checked_types
class CloseUpdate(NamedTuple):
    """Make the update now, from the gradients that are held.

    Attributes:
        reason: text for the log.
    """

    reason: str


@checked_types
class ChangeProtocol(NamedTuple):
    """Change to another protocol and keep the controllers.

    Attributes:
        protocol: protocol from the next update on.
        reason: text for the log.
        counts: whether updates under the new protocol count towards the end of the phase.
        price: price of its staleness for the learning-rate rule "noise", >= 1; None for that of workers of equal speed.
        numbers: numbers behind the decision, by name, for the log.
    """

    protocol: Protocol
    reason: str
    counts: bool = True
    price: float | None = None
    numbers: Mapping[str, float] | None = None


@checked_types
class Exclude(NamedTuple):
    """Exclude a live worker, which stays connected and idle. The last live worker is never excluded.

    Attributes:
        worker: number of the worker.
        reason: text for the log.
    """

    worker: int
    reason: str


@checked_types
class Readmit(NamedTuple):
    """Readmit an excluded worker.

    Attributes:
        worker: number of the worker.
        reason: text for the log.
    """

    worker: int
    reason: str


@checked_types
class Probe(NamedTuple):
    """Time an excluded worker on one minibatch; its gradient is not used.

    Attributes:
        worker: number of the worker.
    """

    worker: int


@checked_types
class ReplaceWorker(NamedTuple):
    """Replace a worker by a new one, where the engine can start workers.

    Attributes:
        worker: number of the worker.
    """

    worker: int


@checked_types
class RestartWork(NamedTuple):
    """Cancel the work of a busy worker, which begins anew at the newest version.

    Attributes:
        worker: number of the worker.
        reason: text for the log.
    """

    worker: int
    reason: str


@checked_types
class CallAgainAt(NamedTuple):
    """Call the controller again at a time, in seconds since the run began.

    Attributes:
        at_s: time in seconds since the run began.
    """

    at_s: float


@checked_types
class Note(NamedTuple):
    """Write a note to the event log; nothing else changes.

    Attributes:
        kind: one word that all notes of a sort share, for example "straggler".
        reason: text of the note.
        worker: id of the worker that the note is about; None for none.
        numbers: numbers behind the note, by name.
    """

    kind: str
    reason: str
    worker: int | None = None
    numbers: Mapping[str, float] | None = None


# In the order in which actions of several controllers apply: notes, membership, lead, protocol, quorum, shares,
# timers.
Action = (
    Note
    | Exclude
    | Readmit
    | Probe
    | ReplaceWorker
    | RestartWork
    | SetLead
    | ChangeProtocol
    | SetQuorum
    | SetShares
    | CloseUpdate
    | CallAgainAt
)
PRECEDENCE: tuple[type[Action], ...] = get_args(Action)


class Controller(ControllerPart, Generic[State]):
    """Base class of controllers, which change the knobs of a protocol while training runs.

    A controller is immutable: `decide` takes its state and returns the next one. So one controller can serve many
    runs, and a run can be stopped and resumed.

    Attributes:
        reads: fields of an observation that the controller needs. "times" are always available, "losses" only where
            gradients are computed. "steps" include the losses, and are measured only if a controller reads them.
            "noise" turns the learning-rate rule "noise" on.
        reads_work: whether the controller reads the work in flight.
        may_interrupt: whether the controller may change to a protocol that interrupts work.
        sets_shares: whether the controller cuts the minibatches of an update into unequal shares.
        takes_stale: whether the controller may change to a protocol that accepts stale gradients.
        fresh_form: what to type for the same controller without stale gradients; empty for nothing.
    """

    def __repr__(self) -> str:
        """Return the controller as its call, the same in every process, because it identifies the plan."""
        if is_dataclass(self):
            return short_repr(self)
        knobs = (f"{name}={getattr(knob, '__qualname__', None) or repr(knob)}" for name, knob in vars(self).items())
        return f"{type(self).__qualname__}({', '.join(knobs)})"

    @abstractmethod
    def begin(self, n: int) -> State:
        """Return the initial state of a phase with n workers, n >= 1."""

    @abstractmethod
    def decide(self, state: State, observation: Observation) -> tuple[State, Sequence[Action]]:
        """Return the next state and the actions to apply, possibly none."""

    def prepare(self, state: State) -> State:
        """Do work of the next decision that does not depend on its observation, and return the state.

        Engines call this while workers compute, so that workers do not wait for that work. The next decision must be
        the same without this call.
        """
        return state

    def added_to(self, phase: Phase) -> Phase:
        """Return the phase with this controller added."""
        return replace(phase, controllers=(*phase.controllers, self), name=f"{phase.title} + {self}")

    def state_dict(self, state: State) -> Any:
        """Return the state for a checkpoint: numbers, text, lists, tuples, sets, dicts and arrays."""
        return state

    def load_state_dict(self, saved: Any) -> State:
        """Return the state that `state_dict` has saved."""
        state: State = saved
        return state


def controllers_of(phase: Phase) -> tuple[Controller[Any], ...]:
    """Return the controllers of a phase."""
    return cast("tuple[Controller[Any], ...]", phase.controllers)


StatefulState = TypeVar("StatefulState", bound=Stateful)


class StatefulController(Controller[StatefulState]):
    """Base class of controllers whose state has a state dict, with the number of workers in it."""

    def state_dict(self, state: StatefulState) -> Any:
        """Return the state dict of the state."""
        return state.state_dict()

    def load_state_dict(self, saved: Any) -> StatefulState:
        """Return the state that `state_dict` has saved."""
        state = self.begin(1)
        state.load_state_dict(saved)
        return state
