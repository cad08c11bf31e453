"""Loss still to go, from the fall of the loss so far."""

from __future__ import annotations

from math import nan

from paceline.policies.estimators.recent_mean import RecentMean
from paceline.utils.state_dict import Stateful

FIRST_GRADIENTS = 24
SHARES = ((0.5, 0.1), (0.25, 0.05))  # of the run, whose mean losses are compared
LARGEST_RISE = 1.5  # over the least value so far
SIGNIFICANT = 3.0  # standard errors
LEAST_CORRECTION = 1 / 3


class LossToGo(Stateful):
    """Estimator of the loss still to go, P: c / t for a loss c / t + constant.

    With m_s the mean loss of the latest share s of the gradients (see `RecentMean`), a pair of shares s > u gives

        P(s, u) = (m_s - m_u) / (1 / (1 - s) - 1 / (1 - u)),

    at least the standard error of m_u over the same denominator. P is the smaller one of P(0.5, 0.1) and P(0.25, 0.05).
    If the loss falls faster than c / t, as c / t^p, both see more to go than there is, the longer memory most: if both
    falls are significant, P is P(0.25, 0.05)^2 / P(0.5, 0.1), correct to 15 % for p up to 1.5. P is at most 1.5 times
    its least value so far: noise that raises the loss must not look like a loss that has far to go.

    Attributes:
        value: P; nan before the first estimate.
        has_fallen: whether the loss has fallen significantly since the run began.
    """

    _saved = ("value", "has_fallen", "_least", "_frozen_until", "_falls")
    _parts = ("_slow_0", "_fast_0", "_slow_1", "_fast_1")

    def __init__(self) -> None:
        self.value = nan
        self.has_fallen = False
        self._least = nan
        self._frozen_until = 0  # gradients
        self._falls: list[float] = []  # of the pairs, when it was frozen
        (self._slow_0, self._fast_0), (self._slow_1, self._fast_1) = (map(RecentMean, pair) for pair in SHARES)

    @property
    def count(self) -> int:
        """Number of gradients."""
        return self._fast_0.count

    @property
    def _pairs(self) -> tuple[tuple[RecentMean, RecentMean], ...]:
        return (self._slow_0, self._fast_0), (self._slow_1, self._fast_1)

    def accept(self, loss: float) -> None:
        """Add the loss of a gradient."""
        for slow, fast in self._pairs:
            slow.add(loss)
            fast.add(loss)

    def freeze(self) -> None:
        """Keep the value until the latest tenth has no gradient from before, and leave the fall until then out.

        This is for a drop of the learning rate by a schedule, after which the loss falls because the noise does.
        """
        if not self._falls:
            self._falls = [slow.mean - fast.mean for slow, fast in self._pairs]
        self._frozen_until = int(self.count / (1 - SHARES[0][1])) + 1

    def update(self) -> float:
        """Compute P from all gradients so far, and return it."""
        if self.count < self._frozen_until:
            return self.value
        for (slow, fast), fall in zip(self._pairs, self._falls, strict=False):
            slow.mean = fast.mean + fall
        self._falls = []
        values, significant = [], []
        for (slow, fast), (s, u) in zip(self._pairs, SHARES, strict=True):
            scale = 1 / (1 - s) - 1 / (1 - u)
            fall, error = slow.mean - fast.mean, fast.standard_error
            significant.append(fall > SIGNIFICANT * error)
            values.append(max(fall, error) / scale)
        self.has_fallen |= any(significant)
        self.value = min(values)
        if all(significant) and values[1] < values[0]:
            self.value *= max(values[1] / values[0], LEAST_CORRECTION)
        if self.count >= FIRST_GRADIENTS:
            if not self._least <= self.value:
                self._least = self.value
            self.value = min(self.value, LARGEST_RISE * self._least)
        return self.value
