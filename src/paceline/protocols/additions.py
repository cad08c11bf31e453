"""Interfaces of what may be added to a protocol, as a plan knows it; policies implement them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

Kind = Literal["scale", "correction"]


class Addition(ABC):
    """Part of a plan that a plus adds to a phase; phases are defined above this module, and named by policies."""

    @abstractmethod
    def added_to(self, phase: Any) -> Any:
        """Return the phase with this part."""


class ControllerPart(Addition):
    """Controller in a plan.

    Attributes:
        reads: fields of an observation that the controller needs. "times" are always available, "losses" only where
            gradients are computed. "steps" include the losses, and are measured only if a controller reads them.
            "noise" turns the learning-rate rule "noise" on.
        reads_work: whether the controller reads the work in flight.
        may_interrupt: whether the controller may change to a protocol that interrupts work.
        sets_shares: whether the controller cuts the minibatches of an update into unequal shares.
        fresh_form: what to type for the same controller without stale gradients; empty for nothing.
        public_name: name of the base class of users' controllers, for messages.
    """

    public_name: ClassVar[str] = "Controller"

    reads: ClassVar[Literal["times", "losses", "steps", "noise"]] = "times"
    reads_work: ClassVar[bool] = False
    may_interrupt: ClassVar[bool] = False
    sets_shares: ClassVar[bool] = False
    fresh_form: ClassVar[str] = ""

    @property
    def takes_stale(self) -> bool:
        """Whether the controller may change to a protocol that accepts stale gradients."""
        return False

    def check(self, protocol: Any, n: int) -> None:
        """Check that the controller can control this protocol on n workers.

        Raises:
            UsageError: it cannot. A controller that would have no effect warns instead.
        """


class CompensatorPart(Addition):
    """Staleness compensator in a plan.

    Attributes:
        name: name on the command line.
        kind: "scale" for a factor on the step, or "correction" for a change of the gradient itself.
        public_name: name of the base class of users' compensators, for messages.
    """

    public_name: ClassVar[str] = "Compensator"

    name: ClassVar[str]
    kind: ClassVar[Kind]
