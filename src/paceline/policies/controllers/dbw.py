"""DBW: wait for as many gradients as lower the loss fastest."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, ClassVar, Literal

from paceline.errors import PacelineWarning
from paceline.policies.controllers.base import Action, Controller, Observation, SetQuorum
from paceline.policies.controllers.update_times import UpdateTimes, fastest
from paceline.policies.estimators.gain import GainEstimator, GainInput
from paceline.policies.estimators.update_time import Unobserved, UpdateTimeEstimator
from paceline.protocols.protocol import Protocol
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_range


@checked_types
@dataclass(frozen=True, repr=False)
class BDBW(Controller[UpdateTimes]):
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
        return short_repr(self)

    def begin(self, n: int) -> UpdateTimes:
        """Know nothing yet."""
        return UpdateTimes(n, UpdateTimeEstimator(n, self.unobserved, self.window, self.forgetting), self.late)

    def decide(self, state: UpdateTimes, moment: Observation) -> tuple[UpdateTimes, Sequence[Action]]:
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

    def state_dict(self, state: UpdateTimes) -> dict[str, Any]:
        """Return what was learnt."""
        return state.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> UpdateTimes:
        """Go on with what was learnt."""
        state = self.begin(saved["n"])
        state.load_state_dict(saved)
        return state


class _State:
    """What DBW remembers: its two estimators, the gradients of the open update, and the losses of the two before."""

    def __init__(self, gain: GainEstimator, times: UpdateTimes) -> None:
        self.gain = gain
        self.times = times
        self.accepted: list[tuple[float, float, float, int]] = []  # loss, squared norm, variance, samples
        self.losses = (nan, nan)  # of the update before the latest, and of the latest
        self.rate = nan  # of the next step
        self.k = 0


@checked_types
@dataclass(frozen=True, repr=False)
class DBW(Controller[_State]):
    """Waits for the k that maximises the expected decrease of the loss per second.

        k_t = argmax_k G_k / T_k                                                                        (18)

    where G_k is the gain of an update of k gradients (`GainEstimator`) and T_k = E[T_kk] the time that it takes if
    every update waits for k (`UpdateTimeEstimator`). If the loss rose, F_{t-1} > beta F_{t-2}, then at least
    k_{t-1} + 1 gradients are waited for (19). The first two updates wait for all.

    Args:
        D: updates that the means of the gain are over, >= 1. The paper has 5. Where times vary much, 20 is better,
            because a single wild estimate of the smoothness changes k less: 57 s against 123 s in the paper's Fig. 6 at
            alpha = 1.
        beta: the loss has risen if it is beta times what it was, >= 1.
        no_gain: what to wait for if no k promises a gain: "all" workers, as the paper does, or "keep" the k before.
        unobserved: which end of the interval of a T_k that was never observed is taken: "lower", "mid" or "upper",
            which never leaves k = n (407 s there).
        window: updates whose times count; None for all, which follow a change of the cluster slowly.
        forgetting: weight of a time after one more update, in (0, 1]; 1 forgets nothing.
        late: whether the times of gradients that came too late to be used count.

    The measured effect of each option is in papers/dbw.

    Source: Xu, Neglia, Sebastianelli, "Dynamic Backup Workers for Parallel Machine Learning", 2020, Sect. 3.3.

    Differs from the paper, or decides where it is silent:
        - No k with a gain is a case of its own, not an argmax over negative numbers, whose largest ratio would be
          that of the longest time, but k = n only by chance.
        - Ties go to the largest k.
        - The loss has risen if F_{t-1} - F_{t-2} > (beta - 1) |F_{t-2}|: the same for positive losses, and right
          for others.
        - Workers that joined or left: k is within those that are live, and the times that were learnt stay.
    """

    D: int = 5
    beta: float = 1.01
    no_gain: Literal["all", "keep"] = "all"
    unobserved: Unobserved = "lower"
    window: int | None = None
    forgetting: float = 1.0
    late: bool = True

    reads: ClassVar[Literal["steps"]] = "steps"

    def __post_init__(self) -> None:
        self.begin(1)  # the estimators check what is theirs
        check_range("[1, inf)", beta=self.beta)

    def __repr__(self) -> str:
        return short_repr(self)

    def check(self, protocol: Protocol, n: int) -> None:
        """Warn of a single worker."""
        if n == 1:
            warnings.warn("one worker leaves DBW nothing to choose: this is plain SGD", PacelineWarning, stacklevel=2)

    def begin(self, n: int) -> _State:
        """Know nothing yet."""
        durations = UpdateTimeEstimator(n, self.unobserved, self.window, self.forgetting)
        return _State(GainEstimator(self.D), UpdateTimes(n, durations, self.late))

    def decide(self, state: _State, moment: Observation) -> tuple[_State, Sequence[Action]]:
        """Learn from every arrival, and choose k when an update opens."""
        if moment.asked == "arrival":
            state.times.hear(moment)
            if moment.accepted and moment.arrival is not None:
                told = moment.arrival
                state.accepted.append((told.loss, told.squared_norm, told.variance, told.samples))
        if moment.asked != "open":
            return state, []
        self._close(state, moment)
        state.times.open(moment)
        state.k, reason = self._choose(state, moment)
        return state, [SetQuorum(state.k, reason)]

    def _close(self, state: _State, moment: Observation) -> None:
        """Learn from the update that was made, if its gradients were all seen."""
        accepted, state.accepted = state.accepted, []
        if moment.step is None:
            return
        state.rate = moment.step.next_learning_rate
        if len(accepted) != moment.made_of:
            return
        samples = sum(size for *_, size in accepted)
        loss, mean_square, within = (sum(size * each[i] for *each, size in accepted) / samples for i in range(3))
        state.gain.observe(GainInput(len(accepted), loss, mean_square, within, moment.step))
        state.losses = (state.losses[1], loss)

    def _choose(self, state: _State, moment: Observation) -> tuple[int, str]:
        n = max(moment.live, 1)
        if n == 1:
            return 1, "plain SGD of one worker"
        rate = state.rate * moment.schedule_scale
        gains = state.gain.gains([rate * moment.learning_rate.scale(k, n) for k in range(1, n + 1)])
        if gains is None:
            return n, "all workers, until loss and gradients of two updates are known"
        k, reason = self._best(gains, state, n)
        before, latest = state.losses
        if latest - before > (self.beta - 1) * abs(before) and k <= state.k < n:
            return state.k + 1, f"more than k={state.k}, because the loss rose from {before:.4g} to {latest:.4g}"
        return k, reason

    def _best(self, gains: Sequence[float], state: _State, n: int) -> tuple[int, str]:
        gain = state.gain
        known = f"|grad|^2 {gain.squared_norm:.3g}, variance {gain.variance:.3g}, L {gain.smoothness:.3g}"
        if max(gains) <= 0:
            k = n if self.no_gain == "all" else min(state.k, n)
            return k, f"no k promises a gain, {'all workers' if k == n else 'as before'}; {known}"
        times_s = state.times.durations.estimate().times.tolist()
        k = fastest(gains, times_s)
        return k, f"expects the loss to fall by {gains[k - 1]:.3g} in {times_s[k - 1]:.3g} s; {known}"

    def state_dict(self, state: _State) -> dict[str, Any]:
        """Return what was learnt."""
        return {
            "gain": state.gain.state_dict(),
            "times": state.times.state_dict(),
            "accepted": list(state.accepted),
            "losses": state.losses,
            "rate": state.rate,
            "k": state.k,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> _State:
        """Go on with what was learnt."""
        state = self.begin(saved["times"]["n"])
        state.gain.load_state_dict(saved["gain"])
        state.times.load_state_dict(saved["times"])
        state.accepted = list(saved["accepted"])
        state.losses = saved["losses"]
        state.rate = saved["rate"]
        state.k = saved["k"]
        return state
