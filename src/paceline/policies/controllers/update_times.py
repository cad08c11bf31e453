"""How long a quorum of k takes, learnt from what a controller hears, and which k is fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from paceline.policies.controllers.base import Observation
from paceline.policies.estimators.update_time import UpdateTimeEstimator

REMEMBERED = 1000  # versions that a late gradient may be of
TIE = 1e-9  # relative; times that are equal in truth differ by their rounding


class UpdateTimes:
    """Finds the sample t_{h,i} that each arrival is, and hands it to the estimator.

    The i-th gradient of version w_t takes t_{h,i} seconds from the moment of the update that made w_t, where h is the
    number of gradients of that update: so many workers begin at once, the others are late. A gradient that is too
    stale to be used is a sample of its own version all the same. Where stale gradients are accepted, the i-th one
    accepted for an update takes the place of the i-th of its version, and there are no late ones.

    Args:
        n: workers, which all begin at once.
        durations: the estimator.
        late: whether arrivals beyond the quorum of their version count.
    """

    def __init__(self, n: int, durations: UpdateTimeEstimator, late: bool) -> None:
        self.durations = durations
        self._n = n
        self._late = late
        self._rounds: dict[int, tuple[int, float, int]] = {}  # version -> h, when it was made, arrivals
        self.rounds_begun = 0

    def open(self, moment: Observation) -> None:
        """Begin the round of a version."""
        if moment.live and moment.live != self._n:
            self._n = moment.live
            self.durations.resize(self._n)
        h = min(moment.made_of or self._n, self._n)
        self._rounds[moment.version] = (h, moment.opened_s, moment.held)  # some, where a phase begins amid an update
        self.rounds_begun += 1
        if len(self._rounds) > REMEMBERED:
            del self._rounds[next(iter(self._rounds))]

    def hear(self, moment: Observation) -> None:
        """Take in an arrival."""
        is_fresh_only = moment.protocol.max_staleness == 0
        if not moment.accepted and not (is_fresh_only and self._late):
            return
        version = moment.version - (moment.staleness if is_fresh_only else 0)
        if version not in self._rounds:
            return  # of a round that began before this controller did, or that is forgotten
        h, opened_s, arrivals = self._rounds[version]
        self._rounds[version] = (h, opened_s, arrivals + 1)
        if arrivals < self._n:
            self.durations.add(version, min(h, self._n), arrivals + 1, moment.now - opened_s)

    def state_dict(self) -> dict[str, Any]:
        """Return the samples and the rounds that may still bring some."""
        return {
            "n": self._n,
            "rounds": dict(self._rounds),
            "rounds_begun": self.rounds_begun,
            "durations": self.durations.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self._n = state["n"]
        self._rounds = dict(state["rounds"])
        self.rounds_begun = state["rounds_begun"]
        self.durations.load_state_dict(state["durations"])


def fastest(gains: Sequence[float], times_s: Sequence[float]) -> int:
    """Return the k of the largest positive gain per second; of equal ones, the largest k.

    A quorum that takes no time at all is faster than any that does.

    Args:
        gains: of an update of 1 ... n gradients, at least one of them > 0.
        times_s: that it takes, >= 0.

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
