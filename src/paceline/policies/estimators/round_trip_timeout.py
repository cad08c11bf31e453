"""Adaptive timeout for silent workers, from the medians of observed round trips."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from math import exp, inf, log, pi, sqrt
from typing import Any

LEAST_S = 10.0
MOST_MEDIANS = 300.0
ENOUGH = 50
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


DEVIATIONS = log(MOST_MEDIANS / SLACK) / sqrt(1 + variance_of_median(ENOUGH))  # 5.52


def multiple(count: int) -> float:
    """Return the timeout in medians of `count` observed round trips, count >= 1.

    ``exp(5.52 sqrt(1 + v))`` with ``v = variance_of_median(count)``. Let the logarithms of round trips be normal with
    standard deviation sigma. Then the logarithm of the next one over their median is normal with standard deviation
    ``sigma sqrt(1 + v)``. It exceeds this timeout with probability ``P(Z > 5.52 / sigma)`` for every count:
    2e-8 at sigma = 1, and 1e-6 at sigma = 1.16. The constant 5.52 gives 300 medians for 50 round trips, the 10 % of
    `SLACK` included.

    >>> [round(multiple(count)) for count in (1, 2, 10, 50, 101)]
    [2468, 1108, 372, 273, 261]
    """
    return exp(DEVIATIONS * sqrt(1 + variance_of_median(count)))


class RoundTripTimeout:
    """Timeout of a silent worker, estimated from the round trips observed so far.

    ``timeout_s = max(10 s, multiple(n) * median)``. The ``median`` is that of the latest ``n`` <= 101 round trips of
    all workers, or that of the worker's own latest 21, whichever is larger. So a slow worker has a longer timeout. A
    worker that stops is detected after at most 300 medians, once 50 round trips were observed, and not before 10 s.

    Probability that a gradient of a live worker raises a false alarm:

    - log-normal round trips up to sigma = 1.16: at most 1e-6, from the first one on (2e-8 at sigma = 1);
    - after 50 round trips, Pareto(2.5): 4e-7, exponential: below 1e-80 (1 in 2,500 after a single one, which may be
      arbitrarily short);
    - heavier tails: the probability beyond 300 medians, for example 1e-3 for Pareto(1.1).

    The first round trip of a worker is compared with the median of the others only. If the worker is 20 times slower,
    it exceeds the timeout with probability 0.5 % at sigma = 1, and 1e-7 at sigma = 0.5. It joins again when its
    gradient arrives, and from then on its own round trips count.

    The minimum of 10 s covers pauses of the operating system, such as swapping or the migration of a virtual machine.

    Attributes:
        timeout_s: timeout of a worker that is no slower than the others, in seconds; inf before the first round trip.
            It stays within 10 % of the estimate and changes rarely.

    Example:
        >>> timeout = RoundTripTimeout()
        >>> for _ in range(25):
        ...     timeout.observe(0, 1.0), timeout.observe(1, 20.0)  # doctest: +ELLIPSIS
        (...)
        >>> timeout.of(1) / timeout.of(0) >= 1
        True
    """

    def __init__(self) -> None:
        self.timeout_s = inf
        self._all = RunningMedian(RECENT)
        self._own: dict[int, RunningMedian] = {}

    @property
    def median_s(self) -> float:
        """Median of the latest round trips of all workers, in seconds."""
        return self._all.value

    @property
    def multiple(self) -> float:
        """The timeout in medians."""
        return multiple(len(self._all))

    def observe(self, worker: int, round_trip_s: float) -> bool:
        """Add a round trip of a worker, in seconds; return whether `timeout_s` has changed."""
        self._all.add(round_trip_s)
        own = self._own.get(worker)
        if own is None:
            own = self._own[worker] = RunningMedian(RECENT_OF_WORKER)
        own.add(round_trip_s)
        estimate_s = max(LEAST_S, _MULTIPLES[len(self._all)] * self._all.value)
        if estimate_s <= self.timeout_s <= SLACK * estimate_s:
            return False
        self.timeout_s = estimate_s if estimate_s == LEAST_S else sqrt(SLACK) * estimate_s
        return True

    def of(self, worker: int) -> float:
        """Return the timeout of a worker in seconds, at least `timeout_s`."""
        own = self._own.get(worker)
        return self.timeout_s if own is None else max(self.timeout_s, self.multiple * own.value)

    def state_dict(self) -> dict[str, Any]:
        """Return the latest round trips and the timeout in force."""
        return {
            "timeout_s": self.timeout_s,
            "all": list(self._all.recent),
            "own": {worker: list(own.recent) for worker, own in self._own.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        self.timeout_s = state["timeout_s"]
        self._all = RunningMedian(RECENT, state["all"])
        self._own = {worker: RunningMedian(RECENT_OF_WORKER, values) for worker, values in state["own"].items()}


_MULTIPLES = [0.0, *(multiple(count) for count in range(1, RECENT + 1))]
