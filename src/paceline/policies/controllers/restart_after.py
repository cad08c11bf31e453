"""Restart of long draws: work that takes too long is cancelled and begun anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from paceline.policies.controllers.base import Action, CallAgainAt, Controller, Observation, RestartWork
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_range

ROUNDING = 1e-12  # of the time since the run began; a timer may come this share too early


@checked_dataclass(frozen=True, repr=False)
class RestartAfter(Controller[None]):
    """Restart of draws that take longer than a fixed time.

    The worker begins a new draw at the newest version, with another minibatch. That pays where long times are random
    and come from the draw; a worker that is always slower than the time would never deliver.

    Args:
        seconds: time after which a draw is begun anew, > 0.

    Source: Maranjyan et al., "MindFlayer", 2024: there with a time and a number of trials for each worker.
    """

    seconds: float

    name: ClassVar[str] = "restart_after"
    reads_work: ClassVar[bool] = True
    may_interrupt: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("(0, inf)", seconds=self.seconds)

    def __repr__(self) -> str:
        return short_repr(self, self.name)

    def begin(self, n: int) -> None:
        """Return the state: none."""

    def decide(self, state: None, observation: Observation) -> tuple[None, Sequence[Action]]:
        """Restart what has taken too long, and ask for a call when the next draw may have."""
        latest_s = self.seconds - ROUNDING * observation.now
        late = [work for work in observation.in_flight if work.elapsed_s >= latest_s]
        elapsed_s = [work.elapsed_s for work in observation.in_flight if work.elapsed_s < latest_s]
        restarts = [RestartWork(work.worker, f"not done after {self.seconds:g} s") for work in late]
        return None, [*restarts, CallAgainAt(observation.now + self.seconds - max(elapsed_s, default=0.0))]
