"""A protocol is five knobs; a phase is a protocol for a part of the run; a plan is phases in sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, replace
from math import inf
from operator import attrgetter
from typing import Literal, TypeAlias

from paceline.core.duration import Duration
from paceline.errors import UsageError
from paceline.protocols.additions import Addition, CompensatorPart, ControllerPart
from paceline.protocols.allreduce import AllReduceConfig
from paceline.protocols.found_for import FoundFor
from paceline.protocols.local_steps import LocalSteps
from paceline.protocols.momentum import KEEP, Momentum
from paceline.utils.argument_types import checked_types
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.wording import counted


class PlanPart(ABC):
    """Operations of a protocol and of a phase that return a phase or a plan."""

    @checked_types
    def until(
        self,
        fraction: float | None = None,
        *,
        updates: int | None = None,
        gradients: int | None = None,
        epochs: float | None = None,
        seconds: float | None = None,
    ) -> Phase:
        """Return the phase, ending at this point of the run, counted from the run's beginning.

        Updates, gradients, epochs and fractions are checked when an update is made: the phase ends with the update
        that reaches them. Seconds end it between two events.
        """
        end = Duration.of(fraction=fraction, updates=updates, gradients=gradients, epochs=epochs, seconds=seconds)
        return replace(self._as_phase(), end=end)

    def __add__(self, added: Added | tuple[Added, ...]) -> Phase:
        phase = self._as_phase()
        for each in added if isinstance(added, tuple) else (added,):
            phase = phase._with(each)
        return phase

    def __rshift__(self, other: Protocol | Phase | Plan) -> Plan:
        return Plan((self._as_phase(),)) >> other

    @abstractmethod
    def _as_phase(self) -> Phase:
        """Return the phase of this part."""


@checked_dataclass(frozen=True, kw_only=True)
class Protocol(PlanPart):
    """Synchronization rule of a parameter server and its workers.

    Args:
        quorum: number of gradients that make an update, >= 1, or "all" live workers.
        max_staleness: largest staleness of an accepted gradient, in versions, >= 0; 0 accepts fresh gradients only, inf
            accepts all.
        refill: time at which a worker whose gradient was accepted gets new work: at the next "update", on "arrival", or
            on arrival of its "share" while samples of the update are left.
        on_update: effect of an update on busy workers: "finish" lets them deliver late, "interrupt" cancels work that
            would be too stale and restarts it on the new version.
        max_lead: largest number of gradients, >= 0, by which a worker may be ahead of the slowest live worker when it
            starts; inf for no bound.
        name: name in logs and tables.

    Raises:
        UsageError: a knob is out of its range, or two knobs contradict each other.

    Example:
        >>> Protocol(quorum=4, max_staleness=0, refill="update", on_update="interrupt", name="k_sync(k=4)")
        k_sync(k=4)
    """

    quorum: int | Literal["all"]
    max_staleness: float
    refill: Literal["update", "arrival", "share"]
    on_update: Literal["finish", "interrupt"] = "finish"
    max_lead: float = inf
    name: str = "protocol"

    def __post_init__(self) -> None:
        if self.quorum != "all" and not _is_count(self.quorum, least=1):
            raise UsageError(f"{self.name}: quorum k = {self.quorum!r}, expected a whole number >= 1")
        for knob in ("max_staleness", "max_lead"):
            value = getattr(self, knob)
            if value != inf and not _is_count(value, least=0):
                raise UsageError(f"{self.name}: {knob} = {value!r}, expected a whole number >= 0 or inf")
        if self.on_update == "interrupt" and self.max_staleness == inf:
            raise UsageError(
                f"{self.name}: on_update = 'interrupt' with max_staleness = inf never interrupts, because no work "
                "becomes too stale; give a finite max_staleness or on_update = 'finish'"
            )
        if self.refill == "share" and (self.quorum != "all" or self.max_staleness):
            raise UsageError(
                f"{self.name}: refill = 'share' with quorum = {self.quorum!r} and max_staleness = "
                f"{self.max_staleness}, but an update of shares has all of its samples, each at its version; give "
                "quorum = 'all' and max_staleness = 0"
            )
        if self.quorum == "all" and self.max_lead != inf:
            raise UsageError(
                f"{self.name}: max_lead = {self.max_lead} has no effect, because every update waits for all workers; "
                "give a number as quorum or max_lead = inf"
            )

    def __repr__(self) -> str:
        return self.name

    def check_workers(self, n: int) -> None:
        """Check that n workers can reach the quorum."""
        if self.quorum != "all" and self.refill == "update" and self.quorum > n:
            raise UsageError(
                f"{self.name}: waits for k = {self.quorum} gradients of {counted(n, 'worker')} that deliver one each "
                f"per update; give k <= {n}, or a protocol that refills on arrival, such as "
                f"k_batch_sync(k={self.quorum})"
            )

    def controlled_by(self, *controllers: ControllerPart) -> Phase:
        """Return a phase with these controllers, which may change the knobs."""
        return Phase(self, controllers=controllers)

    def _as_phase(self) -> Phase:
        return Phase(self)


@checked_dataclass(frozen=True)
class Phase(PlanPart):
    """Protocol with its controllers and modifiers, up to a point of the run.

    Args:
        protocol: protocol at the beginning of the phase.
        controllers: controllers that may change the protocol.
        end: point of the run at which the next phase begins; None for the end of the run.
        name: name in logs and tables; made of the parts if not given.
        compensators: corrections of stale gradients.
        momentum: limit on the momentum of the optimizer.
        allreduce: configuration of the all-reduce, if there is no server; None for a server.
        local_steps: local steps of each worker's work; None for one gradient.

    A plus adds compensators, controllers, a momentum rule and local steps.

    Example:
        >>> from paceline import asp, bsp, elastic, momentum, staleness_lr
        >>> print((bsp() + elastic()).until(0.25) >> asp() + staleness_lr(C=0.01) + momentum("1/n"))
        bsp + elastic until 0.25 of the workload >> asp + staleness_lr(C=0.01) + momentum(rule='1/n')
    """

    protocol: Protocol
    _: KW_ONLY
    controllers: tuple[ControllerPart, ...] = ()
    end: Duration | None = None
    name: str = ""
    compensators: tuple[CompensatorPart, ...] = ()
    momentum: Momentum = KEEP
    allreduce: AllReduceConfig | None = None
    local_steps: LocalSteps | None = None

    def _with(self, added: Added) -> Phase:
        extended: Phase
        match added:
            case Addition():
                extended = added.added_to(self)
                return extended
            case Momentum():
                if self.momentum != KEEP:
                    raise UsageError(f"{self} + {added}: the momentum has a rule already; expected one")
                return replace(self, momentum=added)
            case LocalSteps():
                if self.local_steps is not None:
                    raise UsageError(f"{self} has local steps already; leave {added} out")
                return replace(self, local_steps=added)
            case Phase():  # which stands for its correction, as in pl.asp() + pl.dc_s3gd()
                if added.allreduce is None or added.allreduce.correction is None or added.allreduce.lag > 1:
                    raise UsageError(
                        f"{added} cannot be added to {self}: it is a protocol of its own; expected a compensator, a "
                        "controller or a momentum, such as pl.staleness_lr(C=0.01)"
                    )
                extended = added.allreduce.correction.added_to(self)
                return extended
        raise UsageError(
            f"{added!r} cannot be added to {self}; expected a compensator, a controller, a momentum or local steps, "
            "such as pl.staleness_lr(C=0.01), pl.elastic(), pl.momentum('1/n') or pl.local_steps(H=16)"
        )

    def _as_phase(self) -> Phase:
        return self

    @property
    def title(self) -> str:
        """Name, or else the protocol with its controllers."""
        controlled = f" controlled by {', '.join(map(repr, self.controllers))}" if self.controllers else ""
        return self.name or f"{self.protocol.name}{controlled}"

    def __str__(self) -> str:
        momentum = [] if self.momentum == KEEP else [self.momentum]
        local_steps = [] if self.local_steps is None else [self.local_steps]
        name = " + ".join(map(str, [self.title, *self.compensators, *momentum, *local_steps]))
        return f"{name}{f' until {self.end}' if self.end else ''}"


@checked_dataclass(frozen=True)
class Plan:
    """Sequence of phases.

    Args:
        phases: one or more phases.
        found_for: runs for which a search has found the plan; None if no search has found it.

    Raises:
        UsageError: a phase before the last one has no end, the last one has an end, or the ends do not grow.

    Example:
        >>> from paceline.catalogue.protocols import bsp, asp
        >>> print(bsp().until(0.0625) >> asp())
        bsp until 0.0625 of the workload >> asp
    """

    phases: tuple[Phase, ...]
    found_for: FoundFor | None = None

    def __post_init__(self) -> None:
        if not self.phases:
            raise UsageError("phases=() has no phase; type for example pl.bsp().until(0.25) >> pl.asp()")

    def __rshift__(self, other: Protocol | Phase | Plan) -> Plan:
        follower = as_plan(other)
        for part in (self, follower):
            if part.found_for is not None:
                raise UsageError(
                    f"{part.found_for.file} was found for a run that is {part}, and for no part of a longer plan; "
                    "use it alone, or type what it holds"
                )
        return Plan(self.phases + follower.phases)

    def __str__(self) -> str:
        return " >> ".join(str(phase) for phase in self.phases)

    @property
    def in_full(self) -> str:
        """Plan with every knob; two plans with the same name may differ in it."""
        knobs: list[tuple[object, ...]] = [(vars(phase.protocol), *_KNOBS(phase)) for phase in self.phases]
        if self.local_steps is not None:  # not in the checkpoints of early runs
            knobs.append((self.local_steps,))
        return repr(knobs)

    @property
    def allreduce(self) -> AllReduceConfig | None:
        """Configuration of the all-reduce; None for a plan with a server."""
        return self.phases[0].allreduce

    @property
    def local_steps(self) -> LocalSteps | None:
        """Local steps of each worker's work; None for one gradient."""
        return self.phases[0].local_steps

    @property
    def counts_all(self) -> bool:
        """Whether every gradient counts in the update of its version, as under BSP, unless something fails."""
        return all(
            phase.protocol.quorum == "all"
            and phase.protocol.max_staleness == 0
            and phase.protocol.refill == "update"
            and not phase.controllers
            for phase in self.phases
        )

    @property
    def sets_shares(self) -> bool:
        """Whether a controller cuts the minibatches of an update into unequal shares."""
        return any(controller.sets_shares for phase in self.phases for controller in phase.controllers)


Added: TypeAlias = Addition | Momentum | LocalSteps | Phase
_KNOBS = attrgetter("end", "controllers", "compensators", "momentum", "allreduce")


def as_plan(given: Protocol | Phase | Plan) -> Plan:
    """Return a protocol, a phase or a plan as a plan."""
    match given:
        case Protocol() | Phase():
            return Plan((given._as_phase(),))
        case Plan():
            return given
    raise UsageError(f"{given!r} is no protocol; expected a protocol such as pl.bsp(), a phase or a plan")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
