"""Cost of a sample of a rank, measured where its share changes."""

from __future__ import annotations

from collections import deque
from statistics import median

TIMES = 3  # before and after a change of the share


class SampleCost:
    """Seconds by which each sample more lengthens the updates of a rank.

    With the median t of the last three times at the share w, and t' of the first three at the share w', a sample costs
    (t - t') / (w - w'), at least 0. A part of a rank's time may not depend on its samples: seconds per sample, t / w,
    would count that part again for each sample that the rank had fewer.

    Example:
        >>> cost = SampleCost(equal=8)
        >>> for samples, seconds in [(8, 5.0)] * 3 + [(4, 3.0)] * 3:  # 1 s an update and 0.5 s a sample
        ...     cost.add(samples, seconds)
        >>> cost.with_equal_shares(4, 3.0)
        5.0
    """

    def __init__(self, equal: float) -> None:
        self._equal = equal
        self._samples = equal
        self._times: deque[float] = deque(maxlen=TIMES)  # the latest at this share
        self._count = 0  # of times at this share
        self._before: tuple[float, float] | None = None  # another share, and its time
        self._cost_s: float | None = None

    def add(self, samples: float, seconds: float) -> None:
        """Add the time of an update, > 0."""
        if samples != self._samples:
            is_far = 2 * abs(self._samples - samples) >= abs(self._equal - samples)
            if self._times and (is_far or self._before is None):
                self._before = self._samples, median(self._times)
            self._samples = samples
            self._count = 0
            self._times.clear()
        self._times.append(seconds)
        self._count += 1
        if self._count == TIMES and self._before is not None and self._before[0] != samples:
            other, other_s = self._before
            self._cost_s = max(0.0, (other_s - median(self._times)) / (other - samples))

    def with_equal_shares(self, samples: float, seconds: float) -> float:
        """Return the seconds of an update with the equal share in place of this one.

        As long as no cost is known, a rank with fewer samples is taken to gain nothing by that.
        """
        if self._cost_s is None:
            return seconds * min(1.0, self._equal / samples)
        return seconds + (self._equal - samples) * self._cost_s
