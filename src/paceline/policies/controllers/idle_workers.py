"""Workers that are waited for by nobody: reported, or handed back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from paceline.policies.controllers.base import Action, Controller, Exclude, Note, Observation
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_range

State = dict[int, tuple[int, bool]]  # worker -> (version of its last use, whether that was remarked)


@checked_types
@dataclass(frozen=True, repr=False)
class IdleWorkers(Controller[State]):
    """Reports each worker whose gradients were not used for long, and hands it back if it is told to.

    Where only the fastest gradients are used, a slow worker computes for nothing. Once handed back, it is not
    taken again, not even if more gradients are waited for later.

    Args:
        after: updates without a gradient of a worker, >= 1.
        release: whether it is set aside, as long as others remain.

    Source: the outlook of Xu, Neglia, Sebastianelli (DBW) 2020, Sect. 5.
    """

    after: int = 50
    release: bool = False

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, after=self.after)

    def __repr__(self) -> str:
        return short_repr(self)

    def begin(self, n: int) -> State:
        """Know no worker yet."""
        return {}

    def decide(self, state: State, moment: Observation) -> tuple[State, Sequence[Action]]:
        """Note whose gradient is used, and when an update opens, whose was not."""
        if moment.accepted and moment.arrival is not None:
            state[moment.arrival.worker] = (moment.version, False)
        if moment.asked != "open":
            return state, []
        unknown = (moment.version, False)
        state = {worker: state.get(worker, unknown) for worker in moment.workers}  # who comes back begins anew
        return state, self._remarks(state, moment)

    def _remarks(self, state: State, moment: Observation) -> list[Action]:
        actions: list[Action] = []
        live = moment.live
        for worker, (used, remarked) in state.items():
            unused = moment.version - used
            if remarked or unused < self.after:
                continue
            state[worker] = (used, True)
            reason = f"none of its gradients was used in the last {unused} updates"
            if self.release and live > 1:
                live -= 1
                actions.append(Exclude(worker, f"{reason}; it is handed back"))
            else:
                actions.append(Note("idle", f"worker {worker}: {reason}", worker))
        return actions
