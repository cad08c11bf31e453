"""Times of updates by quorum, from observed arrivals, and the quorum with the largest gain per second."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from paceline.policies.controllers.base import Observation
from paceline.policies.estimators.dbw.update_time import UpdateTimeEstimator
from paceline.utils.state_dict import Stateful

MOST_ROUNDS = 1000  # latest versions whose late gradients are still counted
TIE = 1e-9  # relative tolerance, because equal times differ by rounding


class UpdateTimes(Stateful):
    """Sampler of update times: passes the sample t_{h,i} of each arrival to the estimator.

    t_{h,i} is the time from the update that made version w_t to the i-th gradient of w_t, in seconds. h is the number
    of gradients of that update: h workers start at once, the others start later. A gradient that is too stale to be
    used still counts as a sample of its own version. If the protocol accepts stale gradients, the i-th gradient that
    is accepted for an update takes the place of the i-th of its version, and there are no late gradients.

    If every update restarts all workers (Push & Interrupt), t_{h,i} does not depend on h: every sample is one of T_i.

    Args:
        n: number of workers, which all start at once, >= 1.
        durations: estimator that receives the samples.
        late: whether arrivals beyond the quorum of their version count.
        pooled: whether the samples of T_i are pooled over h where every update restarts all workers.
    """

    _saved = ("n", "rounds", "rounds_begun")
    _parts = ("durations",)

    def __init__(self, n: int, durations: UpdateTimeEstimator, late: bool, pooled: bool = True) -> None:
        self.durations = durations
        self._n = n
        self._late = late
        self._pooled = pooled
        self._rounds: dict[int, tuple[int, float, int]] = {}  # version -> h, time of its update, arrivals
        self.rounds_begun = 0

    def open_round(self, observation: Observation) -> None:
        """Start the round of the current version."""
        if observation.live and observation.live != self._n:
            self._n = observation.live
            self.durations.resize(self._n)
        h = min(observation.update_size or self._n, self._n)
        # Gradients are held already if the phase begins during an update.
        self._rounds[observation.version] = (h, observation.opened_s, observation.held)
        self.rounds_begun += 1
        if len(self._rounds) > MOST_ROUNDS:
            del self._rounds[next(iter(self._rounds))]

    def observe(self, observation: Observation) -> None:
        """Add the sample of an arrival."""
        is_fresh_only = observation.protocol.max_staleness == 0
        if not observation.accepted and not (is_fresh_only and self._late):
            return
        assert observation.arrival is not None
        version = observation.version - (observation.staleness if is_fresh_only else 0)
        if version not in self._rounds:
            return  # a round from before this controller began, or one that was dropped
        h, opened_s, arrivals = self._rounds[version]
        i = arrivals + 1
        self._rounds[version] = (h, opened_s, i)
        if i <= self._n:
            is_of_any_h = self._pooled and observation.protocol.on_update == "interrupt" and is_fresh_only
            t_s = observation.arrival.complete_s - opened_s
            self.durations.add(version, i if is_of_any_h else min(h, self._n), i, t_s)


def fastest(gains: Sequence[float], times_s: Sequence[float]) -> int:
    """Return the k with the largest positive gain per second, the largest such k in a tie.

    A quorum that takes no time is faster than any that does.

    Args:
        gains: gains of an update of 1 ... n gradients, at least one > 0.
        times_s: seconds of an update of 1 ... n gradients, >= 0.

    Example:
        >>> fastest([1.0, 2.0, 2.5], [1.0, 2.0, 3.0])
        2
    """
    speeds = {
        k: gain / time_s if time_s > 0 else inf
        for k, (gain, time_s) in enumerate(zip(gains, times_s, strict=True), start=1)
        if gain > 0
    }
    best = max(speeds.values())
    return max(k for k, speed in speeds.items() if speed >= best * (1 - TIE))
