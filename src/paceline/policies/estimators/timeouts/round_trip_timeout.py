"""Adaptive timeout for silent workers, from the medians of observed round trips and the hazards of loss."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from math import exp, inf, pi, sqrt
from statistics import NormalDist
from typing import Any

from paceline.policies.estimators.timeouts.loss_hazard import LossHazards

LEAST_S = 10.0
MOST_SIGMA = 1.16  # standard deviation of the logarithms of round trips up to which false alarms are as rare as stated
LEAST_PROBABILITY = 1e-6
ALARMS_PER_LOSS = 0.01
SLACK = 1.1  # the timeout in force is between the estimate and this multiple of it
RECENT, RECENT_OF_WORKER = 101, 21


class RunningMedian:
    """Running median of the latest values, in about a microsecond a value.

    Args:
        size: number of latest values that count, >= 1.
        values: initial values, oldest first.

    Example:
        >>> median = RunningMedian(3, [5.0, 1.0])
        >>> for value in (2.0, 9.0):
        ...     median.add(value)
        >>> median.value  # of 1, 2 and 9
        2.0
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.recent = deque(values, size)
        self._sorted = sorted(self.recent)

    def __len__(self) -> int:
        return len(self.recent)

    @property
    def value(self) -> float:
        """The median; 0 without a value."""
        count = len(self._sorted)
        return (self._sorted[(count - 1) // 2] + self._sorted[count // 2]) / 2 if count else 0.0

    def add(self, value: float) -> None:
        """Add a value; it replaces the oldest one when the window is full."""
        if len(self.recent) == self.recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self.recent[0])]
        self.recent.append(value)
        insort(self._sorted, value)


def variance_of_median(count: int) -> float:
    """Return the approximate variance of the median of `count` standard normal values, count >= 1.

    ``pi / (2 (count - 1) + pi)``: 1 for one value, and ``pi / (2 count)`` for many.
    """
    return pi / (2 * (count - 1) + pi)


def false_alarm_probability(hazard: float, round_trip_s: float) -> float:
    """Return the probability with which a gradient of a live worker may raise a false alarm.

    ``max(1e-6, min(1, hazard round_trip_s) / 100)``: one false alarm in a hundred losses, or one in a million gradients
    if losses are rarer than one in 10,000 gradients.

    Args:
        hazard: losses of the worker per second, >= 0.
        round_trip_s: its usual round trip in seconds, >= 0.
    """
    return max(LEAST_PROBABILITY, ALARMS_PER_LOSS * min(1.0, hazard * round_trip_s))


def multiple(count: int, probability: float = LEAST_PROBABILITY) -> float:
    """Return the timeout in medians of observed round trips.

    ``exp(1.16 z sqrt(1 + v))`` with ``v = variance_of_median(count)`` and ``P(Z > z) = probability``. Let the
    logarithms of round trips be normal with standard deviation sigma. Then the logarithm of the next one over their
    median is normal with standard deviation ``sigma sqrt(1 + v)``. It exceeds this timeout with `probability` at
    sigma = 1.16, and less often for a smaller sigma, for every count.

    Args:
        count: number of observed round trips, >= 1.
        probability: probability of a false alarm, > 0 and < 1/2.

    Example:
        >>> [round(multiple(count)) for count in (1, 2, 10, 50, 101)]
        [2436, 1095, 369, 270, 259]
        >>> [round(multiple(101, probability)) for probability in (1e-5, 1e-4, 1e-3)]
        [146, 77, 37]
    """
    return exp(-_NORMAL.inv_cdf(probability) * MOST_SIGMA * sqrt(1 + variance_of_median(count)))


_NORMAL = NormalDist()


class RoundTripTimeout:
    """Timeout of a silent worker, estimated from the round trips and losses observed so far.

    ``timeout_s = max(10 s, multiple(n, p) * median)`` with ``p = false_alarm_probability(hazard, median)``. The
    ``median`` is that of the latest ``n`` <= 101 round trips of all workers, or that of the worker's own latest 21,
    whichever is larger. So a slow worker has a longer timeout. The ``hazard`` is that of the worker, see `LossHazards`:
    the more often it is lost, the sooner its silence is believed to be a loss. A worker that stops is detected after at
    most 300 medians, once 50 round trips were observed, and not before 10 s.

    Probability that a gradient of a live worker raises a false alarm:

    - log-normal round trips up to sigma = 1.16: at most ``p``, from the first one on. Where ``p`` is 1e-6, it is 2e-8
      at sigma = 1;
    - after 50 round trips and with ``p`` = 1e-6: Pareto(2.5): 4e-7, exponential: below 1e-80 (1 in 2,500 after a single
      one, which may be arbitrarily short);
    - heavier tails: the probability beyond the timeout, for example 1e-3 for Pareto(1.1) and 300 medians.

    False alarms are no losses, so they do not shorten the timeout.

    The first round trip of a worker is compared with the median of the others only. If the worker is 20 times slower,
    it exceeds the timeout with probability 0.5 % at sigma = 1, and 1e-7 at sigma = 0.5. It joins again when its
    gradient arrives, and from then on its own round trips count.

    The minimum of 10 s covers pauses of the operating system, such as swapping or the migration of a virtual machine.

    Attributes:
        hazards: hazards of loss of the workers.
        timeout_s: timeout of a worker that is no slower than the others and has the largest hazard, in seconds; inf
            before the first round trip. It stays within 10 % of the estimate and changes rarely.

    Example:
        >>> timeout = RoundTripTimeout()
        >>> for _ in range(25):
        ...     timeout.observe(0, 1.0), timeout.observe(1, 20.0)  # doctest: +ELLIPSIS
        (...)
        >>> timeout.of(1) / timeout.of(0) >= 1
        True
    """

    def __init__(self) -> None:
        self.hazards = LossHazards()
        self.timeout_s = inf
        self._all = RunningMedian(RECENT)
        self._own: dict[int, RunningMedian] = {}

    def observe(self, worker: int, round_trip_s: float) -> bool:
        """Add a round trip of a worker, in seconds; return whether `timeout_s` has changed."""
        self.hazards.add_round_trip(worker, round_trip_s)
        self._all.add(round_trip_s)
        own = self._own.get(worker)
        if own is None:
            own = self._own[worker] = RunningMedian(RECENT_OF_WORKER)
        own.add(round_trip_s)
        estimate_s = self._estimate_s(self._all.value, self.hazards.largest)
        if estimate_s <= self.timeout_s <= SLACK * estimate_s:
            return False
        self.timeout_s = estimate_s if estimate_s == LEAST_S else sqrt(SLACK) * estimate_s
        return True

    def of(self, worker: int) -> float:
        """Return the timeout of a worker in seconds, at least `timeout_s`."""
        return max(self.timeout_s, self._estimate_s(self.median_s(worker), self.hazards.of(worker)))

    @property
    def median_of_all_s(self) -> float:
        """Median of the latest round trips of all workers, in seconds."""
        return self._all.value

    def median_s(self, worker: int) -> float:
        """Return the median of the latest round trips of a worker, in seconds, at least that of all workers."""
        own = self._own.get(worker)
        return self._all.value if own is None else max(self._all.value, own.value)

    def _estimate_s(self, median_s: float, hazard: float) -> float:
        return max(LEAST_S, multiple(len(self._all), false_alarm_probability(hazard, median_s)) * median_s)

    def state_dict(self) -> dict[str, Any]:
        """Return the latest round trips, the hazards and the timeout in force."""
        return {
            "hazards": self.hazards.state_dict(),
            "timeout_s": self.timeout_s,
            "all": list(self._all.recent),
            "own": {worker: list(own.recent) for worker, own in self._own.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        self.hazards.load_state_dict(state["hazards"])
        self.timeout_s = state["timeout_s"]
        self._all = RunningMedian(RECENT, state["all"])
        self._own = {worker: RunningMedian(RECENT_OF_WORKER, values) for worker, values in state["own"].items()}
