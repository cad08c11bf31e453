"""B-DBW: wait for as many gradients as bring the most of them a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.argument_types import checked_types
from paceline.controllers.base import Action, Controller, Moment, SetQuorum
from paceline.controllers.round_times import RoundTimes, fastest
from paceline.estimators.duration import DurationEstimator, Unobserved
from paceline.text import brief


@checked_types
@dataclass(frozen=True, repr=False)
class BDBW(Controller[RoundTimes]):
    """Waits for the k that maximises k / T_k: blind DBW, which knows nothing of the loss and its gradients.

    The first two updates wait for all.

    Args:
        unobserved: as of `DBW`, like all that follow.
        window: updates whose times count; None for all.
        forgetting: weight of a time after one more update, in (0, 1].
        late: whether the times of gradients that came too late to be used count.

    Source: Xu, Neglia, Sebastianelli (DBW) 2020, Sect. 4, after Teng and Wood, "Bayesian distributed stochastic
    gradient descent", 2018.
    """

    unobserved: Unobserved = "lower"
    window: int | None = None
    forgetting: float = 1.0
    late: bool = True

    def __post_init__(self) -> None:
        self.begin(1)

    def __repr__(self) -> str:
        return brief(self)

    def begin(self, n: int) -> RoundTimes:
        """Know nothing yet."""
        return RoundTimes(n, DurationEstimator(n, self.unobserved, self.window, self.forgetting), self.late)

    def decide(self, state: RoundTimes, moment: Moment) -> tuple[RoundTimes, Sequence[Action]]:
        """Learn from every arrival, and choose k when an update opens."""
        if moment.asked == "arrival":
            state.hear(moment)
        if moment.asked != "open":
            return state, []
        state.open(moment)
        n = max(moment.live, 1)
        if state.rounds_begun <= 2:
            return state, [SetQuorum(n, "all workers in the first two updates")]
        times_s = state.durations.estimate().times.tolist()[:n]  # nobody at all may be live
        k = fastest(range(1, n + 1), times_s)
        return state, [SetQuorum(k, f"expects {k} gradients in {times_s[k - 1]:.3g} s")]

    def state_dict(self, state: RoundTimes) -> dict[str, Any]:
        """Return what was learnt."""
        return state.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> RoundTimes:
        """Go on with what was learnt."""
        state = self.begin(saved["n"])
        state.load_state_dict(saved)
        return state
