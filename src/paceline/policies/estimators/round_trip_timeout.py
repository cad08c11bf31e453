"""Timeout for silent workers, from the medians of observed round trips: numbers in, a number out."""

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


class Median:
    """Running median of the latest values, in about a microsecond a value.

    Args:
        size: number of values that count, >= 1.
        values: to begin with, oldest first.

    Example:
        >>> median = Median(3, [5.0, 1.0])
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
        """The median; 0 without any value."""
        count = len(self._sorted)
        return (self._sorted[(count - 1) // 2] + self._sorted[count // 2]) / 2 if count else 0.0

    def add(self, value: float) -> None:
        """Take in a value in place of the oldest one."""
        if len(self.recent) == self.recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self.recent[0])]
        self.recent.append(value)
        insort(self._sorted, value)


def variance_of_median(count: int) -> float:
    """Return about the variance of the median of so many standard normal values.

    ``pi / (2 (count - 1) + pi)``: 1 for one value, and ``pi / (2 count)`` for many.
    """
    return pi / (2 * (count - 1) + pi)


DEVIATIONS = log(MOST_MEDIANS / SLACK) / sqrt(1 + variance_of_median(ENOUGH))  # 5.52


def multiple(count: int) -> float:
    """Return how many medians of so many round trips may pass before a worker counts as lost.

    ``exp(5.52 sqrt(1 + v))`` with ``v = variance_of_median(count)``. If the logarithms of round trips are normal with
    standard deviation sigma, that of the next one minus that of their median is normal with standard deviation
    ``sigma sqrt(1 + v)``. So it exceeds this with probability ``P(Z > 5.52 / sigma)``, after however few round trips:
    2e-8 at sigma = 1, and 1e-6 at sigma = 1.16. The number 5.52 makes it 300 medians, the 10 % of `SLACK` included,
    for 50 round trips.

    >>> [round(multiple(count)) for count in (1, 2, 10, 50, 101)]
    [2468, 1108, 372, 273, 261]
    """
    return exp(DEVIATIONS * sqrt(1 + variance_of_median(count)))


class RoundTripTimeout:
    """How long a worker may be silent, from the round trips observed so far.

    ``timeout_s = max(10 s, multiple(n) * median)``, where ``median`` is the larger one of that of all workers'
    latest ``n`` <= 101 round trips and that of the worker's own latest 21. So a worker that has always been slower than
    the others is waited for longer. A worker that stops is found after at most 300 medians once 50 round trips were
    seen, or after 10 s, if that is longer.

    A gradient of a worker that is there raises a false alarm with probability

    - at most 1e-6 for log-normal round trips up to sigma = 1.16 (2e-8 at sigma = 1), from the first one on;
    - 4e-7 for Pareto(2.5) and less than 1e-80 for exponential ones, once 50 were seen (after a single one, 1 in 2,500,
      as exponential times may be as short as one likes); with a heavier tail, what is left beyond 300 medians, as 1e-3
      for Pareto(1.1).

    A worker's first round trip is measured against the median of the others only: if it is 20 x slower than they are,
    0.5 % are longer than that at sigma = 1, and 1e-7 at sigma = 0.5. It joins again when it delivers, and from then on
    its own round trips count.

    Pauses of the operating system, such as swapping or the move of a virtual machine, last for seconds however short a
    gradient is: the 10 s are for them.

    Attributes:
        timeout_s: for a worker that is no slower than the others, in seconds; inf while no round trip is known. It
            follows the estimate within 10 %, so that it does not change with every gradient.

    Example:
        >>> silence = RoundTripTimeout()
        >>> for _ in range(25):
        ...     silence.observe(0, 1.0), silence.observe(1, 20.0)  # doctest: +ELLIPSIS
        (...)
        >>> silence.of(1) / silence.of(0) >= 1
        True
    """

    def __init__(self) -> None:
        self.timeout_s = inf
        self._all = Median(RECENT)
        self._own: dict[int, Median] = {}

    @property
    def median_s(self) -> float:
        """Median of the latest round trips of all workers, in seconds."""
        return self._all.value

    @property
    def multiple(self) -> float:
        """Medians that may pass."""
        return multiple(len(self._all))

    def observe(self, worker: int, round_trip_s: float) -> bool:
        """Take in a round trip of this worker, in seconds; return whether `timeout_s` has changed."""
        self._all.add(round_trip_s)
        own = self._own.get(worker)
        if own is None:
            own = self._own[worker] = Median(RECENT_OF_WORKER)
        own.add(round_trip_s)
        estimate_s = max(LEAST_S, _MULTIPLES[len(self._all)] * self._all.value)
        if estimate_s <= self.timeout_s <= SLACK * estimate_s:
            return False
        self.timeout_s = estimate_s if estimate_s == LEAST_S else sqrt(SLACK) * estimate_s
        return True

    def of(self, worker: int) -> float:
        """Return the seconds that this worker may be silent, at least `timeout_s`."""
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
        """Go on from such a state."""
        self.timeout_s = state["timeout_s"]
        self._all = Median(RECENT, state["all"])
        self._own = {worker: Median(RECENT_OF_WORKER, values) for worker, values in state["own"].items()}


_MULTIPLES = [0.0, *(multiple(count) for count in range(1, RECENT + 1))]
