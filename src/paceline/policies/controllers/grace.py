"""Grace period: an update waits a while after its quorum for gradients that are about to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from numbers import Integral
from typing import TYPE_CHECKING, ClassVar

from paceline.errors import UsageError
from paceline.policies.controllers.base import Action, CallAgainAt, CloseUpdate, Controller, Observation
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_range

if TYPE_CHECKING:
    from paceline.protocols.protocol import Phase, Protocol


@checked_dataclass(frozen=True, repr=False)
class Grace(Controller[float]):
    """Grace period after the quorum.

    An update of a protocol with a quorum of k gradients is made a fixed time after the k-th one, or as soon as every
    live worker has contributed.

    Args:
        seconds: time from the k-th gradient to the update, > 0.
        quorum: k, >= 1; None for the quorum of the protocol that the grace period is added to.

    Raises:
        UsageError: another controller sets the quorum.

    Source: none; a quorum with a grace window is that of Decoupled DiLoCo, 2026.
    """

    seconds: float
    quorum: int | None = None

    name: ClassVar[str] = "grace"

    def __post_init__(self) -> None:
        check_range("(0, inf)", seconds=self.seconds)
        if self.quorum is not None:
            check_range("[1, inf)", Integral, quorum=self.quorum)

    def __repr__(self) -> str:
        return short_repr(self, self.name, without={"quorum"})

    def added_to(self, phase: Phase) -> Phase:
        """Return the phase with this grace period after its quorum, which all live workers bound from above."""
        protocol = phase.protocol
        if protocol.quorum == "all" or protocol.max_lead < inf:
            raise UsageError(
                f"{phase.title} has no quorum of k gradients after which an update could wait; type for example "
                f"k_sync(k=6) + {self}"
            )
        waits = replace(self, quorum=protocol.quorum)
        phase = replace(phase, protocol=replace(protocol, quorum="all"), name=phase.title)
        return replace(phase, controllers=(*phase.controllers, waits), name=f"{phase.title} + {self}")

    def check(self, protocol: Protocol, n: int) -> None:
        """Check that n workers can reach the quorum."""
        replace(protocol, quorum=self.quorum or protocol.quorum).check_workers(n)

    def begin(self, n: int) -> float:
        """Return the initial state: no time at which the open update is made."""
        return inf

    def decide(self, state: float, observation: Observation) -> tuple[float, Sequence[Action]]:
        """Set a timer at the k-th gradient, and close the update then."""
        if observation.trigger == "open":
            return inf, []
        if observation.protocol.quorum == "all" and observation.quorum < inf:
            raise UsageError(
                f"{self} waits after a fixed quorum, but another controller sets it; leave one of the two out"
            )
        if observation.trigger == "arrival" and observation.held == self.quorum:
            due_s = observation.now + self.seconds
            return due_s, [CallAgainAt(due_s)]
        if observation.trigger == "timer" and observation.now >= state:
            return inf, [CloseUpdate(f"{self.seconds:g} s after the quorum of {self.quorum}")]
        return state, []
