"""Detection and release of idle workers, whose gradients are never used."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from paceline.policies.controllers.base import Action, Controller, Exclude, Note, Observation
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.validation import check_range

State = dict[int, tuple[int, bool]]  # worker -> (version of its last use, whether it was reported)


@checked_dataclass(frozen=True, repr=False)
class IdleWorkers(Controller[State]):
    """Reports each worker none of whose gradients was used for a number of updates, and optionally excludes it.

    Where only the fastest gradients are used, the work of a slow worker is wasted. A worker that was excluded stays
    excluded, even if the quorum grows later.

    Args:
        after: number of consecutive updates without a gradient of the worker, >= 1.
        release: whether the worker is excluded; the last live worker is kept.

    Source: the outlook of Xu, Neglia, Sebastianelli (DBW) 2020, Sect. 5.
    """

    after: int = 50
    release: bool = False

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, after=self.after)

    def begin(self, n: int) -> State:
        """Return the initial state: no workers."""
        return {}

    def decide(self, state: State, observation: Observation) -> tuple[State, Sequence[Action]]:
        """Record whose gradient is used, and report the idle workers when an update opens."""
        if observation.accepted and observation.arrival is not None:
            state[observation.arrival.worker] = (observation.version, False)
        if observation.trigger != "open":
            return state, []
        unknown = (observation.version, False)
        # A worker that comes back starts anew.
        state = {worker: state.get(worker, unknown) for worker in observation.workers}
        return state, self._report(state, observation)

    def _report(self, state: State, observation: Observation) -> list[Action]:
        actions: list[Action] = []
        live = observation.live
        for worker, (used, is_reported) in state.items():
            unused = observation.version - used
            if is_reported or unused < self.after:
                continue
            state[worker] = (used, True)
            reason = f"none of its gradients was used in the last {unused} updates"
            if self.release and live > 1:
                live -= 1
                actions.append(Exclude(worker, f"{reason}; it is excluded"))
            else:
                actions.append(Note("idle", f"worker {worker}: {reason}", worker))
        return actions
