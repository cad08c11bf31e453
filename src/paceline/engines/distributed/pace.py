"""What of an iteration without a server was neither computing nor the sum: messages, and being woken up."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from paceline.reduction import Reduction


class Pace:
    """Goes through the iterations as the simulation does, and sees what is left over.

    With b_i when worker i began, c_i the seconds that it computed, s when the sum before was there, where it overlaps
    gradients (else -inf), and m when the last worker had handed in,

        left over = max(0, m - max(b_i + c_i, s))

    Args:
        reduction: what is summed, and when.
        now: seconds since the run began.

    Example:
        >>> pace = Pace(Reduction("gradients"), now=0.0)
        >>> pace.handed_in({0: 1.0, 1: 2.0}, at_s=2.5)
        0.5
        >>> pace.summed(sum_s=0.5)
        0.5
        >>> pace.handed_in({0: 2.0, 1: 1.0}, at_s=5.0)
        0.0
    """

    def __init__(self, reduction: Reduction, now: float) -> None:
        self._overlaps = reduction.overlaps
        self._begun_s: dict[int, float] = {}
        self._free_s = now  # whoever has not begun
        self._summed_s = -inf
        self._left_s = 0.0

    def handed_in(self, compute_s: Mapping[int, float], at_s: float) -> float:
        """Return the seconds that are left over when the last worker has handed in."""
        begun_s = (self._begun_s.get(worker, self._free_s) + seconds for worker, seconds in compute_s.items())
        ready_s = {worker: max(each, self._summed_s) for worker, each in zip(compute_s, begun_s, strict=True)}
        last_s = max(ready_s.values(), default=at_s)
        left_s = max(0.0, at_s - last_s)
        self._begun_s = {worker: each + left_s for worker, each in ready_s.items()}
        self._free_s = last_s + left_s  # not before the simulation is there, so that what it is late by is made up for
        self._left_s = left_s
        return left_s

    def summed(self, sum_s: float) -> float:
        """Take note of how long the sum has taken from then on; return it with what is left over and cannot hide."""
        if self._overlaps:
            self._summed_s = self._free_s + sum_s
            return sum_s + self._left_s
        self._begun_s, self._free_s = {}, self._free_s + sum_s
        return sum_s
