"""Dynamic backup workers (DBW): the quorum with the largest expected decrease of the loss per second."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import nan
from typing import ClassVar, Literal

from paceline.errors import PacelineWarning
from paceline.policies.controllers.base import Action, Observation, SetQuorum, StatefulController
from paceline.policies.controllers.update_times import UpdateTimes, fastest
from paceline.policies.estimators.dbw.gain import GainEstimator, GainInput
from paceline.policies.estimators.dbw.update_time import Unobserved, UpdateTimeEstimator
from paceline.protocols.protocol import Protocol
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.state_dict import Stateful
from paceline.utils.validation import check_range


@checked_dataclass(frozen=True, repr=False, kw_only=True)
class BDBW(StatefulController[UpdateTimes]):
    """Blind DBW: sets the quorum k that maximises k / T_k, without losses or gradients.

    The first two updates wait for all workers.

    Args:
        unobserved: end of the interval of a T_k without samples that is taken: "lower", "mid" or "upper"; see `DBW`.
        window: number of latest updates whose times count, >= 1; None for all.
        forgetting: factor on the weight of a time at each further update, in (0, 1].
        late: whether the times of gradients that arrived too late to be used count.
        pooled: whether all samples of T_k count together where every update restarts all workers; see `DBW`.

    Source: Xu, Neglia, Sebastianelli (DBW) 2020, Sect. 4, after Teng and Wood, "Bayesian distributed stochastic
    gradient descent", 2018.
    """

    unobserved: Unobserved = "lower"
    window: int | None = None
    forgetting: float = 1.0
    late: bool = True
    pooled: bool = True

    def __post_init__(self) -> None:
        self.begin(1)  # the estimator checks its arguments

    def begin(self, n: int) -> UpdateTimes:
        """Return the initial state: no times."""
        durations = UpdateTimeEstimator(n, self.unobserved, self.window, self.forgetting)
        return UpdateTimes(n, durations, self.late, self.pooled)

    def decide(self, state: UpdateTimes, observation: Observation) -> tuple[UpdateTimes, Sequence[Action]]:
        """Record the time of every arrival, and set k when an update opens."""
        if observation.trigger == "arrival":
            state.observe(observation)
        if observation.trigger != "open":
            return state, []
        state.open_round(observation)
        n = max(observation.live, 1)
        if state.rounds_begun <= 2:
            return state, [SetQuorum(n, "all workers in the first two updates")]
        times_s = state.durations.estimate().times.tolist()[:n]  # without a live worker n is 1
        k = fastest(range(1, n + 1), times_s)
        return state, [SetQuorum(k, f"expects {k} gradients in {times_s[k - 1]:.3g} s")]


class _State(Stateful):
    """State of DBW: its two estimators, the gradients of the open update, and the losses of the two before."""

    _saved = ("accepted", "losses", "rate", "k")
    _parts = ("gain", "times")

    def __init__(self, gain: GainEstimator, times: UpdateTimes) -> None:
        self.gain = gain
        self.times = times
        self.accepted: list[tuple[float, float, float, int]] = []  # loss, squared norm, variance, samples
        self.losses = (nan, nan)  # of the update before the latest, and of the latest
        self.rate = nan  # of the next step
        self.k = 0


@checked_dataclass(frozen=True, repr=False, kw_only=True)
class DBW(StatefulController[_State]):
    """Dynamic backup workers: sets the quorum that maximises the expected decrease of the loss per second.

        k_t = argmax_k G_k / T_k                                                                        (18)

    G_k is the gain of an update of k gradients (``GainEstimator``). T_k = E[T_kk] is the time of an update if every
    update waits for k gradients (``UpdateTimeEstimator``). If the loss rose, F_{t-1} > beta F_{t-2}, the quorum is at
    least k_{t-1} + 1 (19). The first two updates wait for all workers.

    Args:
        D: number of updates over which the means of the gain are taken, >= 1; 5 in the paper. For times that vary
            much, 20 is better, because an outlier of the smoothness changes k less: 62 s (mean of 20 seeds) instead
            of 109 s (of 10) in the paper's Fig. 6 at alpha = 1.
        beta: ratio of two losses above which the loss has risen, >= 1.
        no_gain: quorum if no k has a positive gain: "all" workers, as in the paper, or "keep" the k before.
        unobserved: end of the interval of a T_k without samples that is taken: "lower", "mid" or "upper". "upper"
            never leaves k = n (407 s in the case above).
        window: number of latest updates whose times count, >= 1; None for all, which follows changes of the cluster
            slowly.
        forgetting: factor on the weight of a time at each further update, in (0, 1]; 1 keeps all weights.
        late: whether the times of gradients that arrived too late to be used count.
        pooled: whether all samples of T_k count together where every update restarts all workers, as under `k_sync`;
            false keeps apart those after updates of different sizes, as the paper does for Push & Wait.

    The measured effect of each option is in papers/dbw.

    Source: Xu, Neglia, Sebastianelli, "Dynamic Backup Workers for Parallel Machine Learning", 2020, Sect. 3.3.

    Differs from the paper, or specifies what it leaves open:
        - If no k has a gain, ``no_gain`` applies. An argmax over negative gains would take the longest time, and that
          is k = n only by chance.
        - Ties go to the largest k.
        - The loss has risen if ``F_{t-1} - F_{t-2} > (beta - 1) |F_{t-2}|``: the same for positive losses, and valid
          for others.
        - Under Push & Interrupt, for which the paper says that small adaptations are needed, samples are ``pooled``.
        - If workers join or leave, k stays within the live ones, and the samples of times are kept.
    """

    D: int = 5
    beta: float = 1.01
    no_gain: Literal["all", "keep"] = "all"
    unobserved: Unobserved = "lower"
    window: int | None = None
    forgetting: float = 1.0
    late: bool = True
    pooled: bool = True

    reads: ClassVar[Literal["steps"]] = "steps"

    def __post_init__(self) -> None:
        self.begin(1)  # the estimators check their arguments
        check_range("[1, inf)", beta=self.beta)

    def check(self, protocol: Protocol, n: int) -> None:
        """Warn if there is a single worker."""
        if n == 1:
            warnings.warn("dbw has no effect with one worker: this is plain SGD", PacelineWarning, stacklevel=2)

    def begin(self, n: int) -> _State:
        """Return the initial state: no gains and no times."""
        durations = UpdateTimeEstimator(n, self.unobserved, self.window, self.forgetting)
        return _State(GainEstimator(self.D), UpdateTimes(n, durations, self.late, self.pooled))

    def decide(self, state: _State, observation: Observation) -> tuple[_State, Sequence[Action]]:
        """Record every arrival, and set k when an update opens."""
        if observation.trigger == "arrival":
            state.times.observe(observation)
            if observation.accepted and observation.arrival is not None:
                measured = observation.arrival.measured
                state.accepted.append((measured.loss, measured.squared_norm, measured.variance, measured.samples))
        if observation.trigger != "open":
            return state, []
        self._close(state, observation)
        state.times.open_round(observation)
        state.k, reason = self._choose(state, observation)
        return state, [SetQuorum(state.k, reason)]

    def _close(self, state: _State, observation: Observation) -> None:
        """Pass the latest update to the gain estimator, if all of its gradients were observed."""
        accepted, state.accepted = state.accepted, []
        if observation.step is None:
            return
        state.rate = observation.step.next_learning_rate
        if len(accepted) != observation.update_size:
            return
        samples = sum(size for *_, size in accepted)
        loss, mean_square, within = (sum(size * each[i] for *each, size in accepted) / samples for i in range(3))
        state.gain.observe(
            GainInput(k=len(accepted), loss=loss, mean_square=mean_square, within=within, step=observation.step)
        )
        state.losses = (state.losses[1], loss)

    def _choose(self, state: _State, observation: Observation) -> tuple[int, str]:
        n = max(observation.live, 1)
        if n == 1:
            return 1, "plain SGD of one worker"
        rate = state.rate * observation.schedule_scale
        gains = state.gain.gains([rate * observation.learning_rate.scale(k, n) for k in range(1, n + 1)])
        if gains is None:
            return n, "all workers, until loss and gradients of two updates are known"
        k, reason = self._best(gains, state, n)
        before, latest = state.losses
        # This is (19) for losses > 0, and right for negative ones too.
        if latest - before > (self.beta - 1) * abs(before) and k <= state.k < n:
            return state.k + 1, f"more than k={state.k}, because the loss rose from {before:.4g} to {latest:.4g}"
        return k, reason

    def _best(self, gains: Sequence[float], state: _State, n: int) -> tuple[int, str]:
        gain = state.gain
        estimates = f"|grad|^2 {gain.squared_norm:.3g}, variance {gain.variance:.3g}, L {gain.smoothness:.3g}"
        if max(gains) <= 0:
            k = n if self.no_gain == "all" else min(state.k, n)
            return k, f"no k has a positive gain, {'all workers' if k == n else 'k as before'}; {estimates}"
        times_s = state.times.durations.estimate().times.tolist()
        k = fastest(gains, times_s)
        return k, f"expects the loss to fall by {gains[k - 1]:.3g} in {times_s[k - 1]:.3g} s; {estimates}"
