"""Mean of the latest share of a sequence, in constant memory."""

from __future__ import annotations

from paceline.utils.state_dict import Stateful
from paceline.utils.validation import check_range


class RecentMean(Stateful):
    """Mean of a growing sequence in which the latest share s has most of the weight.

    With values x_1 ... x_t,

        m_t = m_{t-1} + min(1, 1 / (s t)) (x_t - m_{t-1}),

    so that the weight of x_i grows as i^(1/s - 1). If x_i = c / i, then m_t is about c / ((1 - s) t).

    Args:
        share: s, in (0, 1].

    Attributes:
        count: number of values t.
        mean: m_t; 0 without values.

    Example:
        >>> mean = RecentMean(0.5)
        >>> for i in range(1, 1001):
        ...     mean.add(1 / i)
        >>> round(1000 * mean.mean, 2)
        1.99
    """

    _saved = ("count", "mean")
    __slots__ = (*_saved, "_share")

    def __init__(self, share: float) -> None:
        check_range("(0, 1]", share=share)
        self._share = share
        self.count = 0
        self.mean = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        weight = min(1.0, 1.0 / (self._share * self.count))
        self.mean += weight * (value - self.mean)
