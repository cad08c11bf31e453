"""Detector of a rise of the loss beyond its noise."""

from __future__ import annotations

from math import inf, sqrt

from paceline.utils.state_dict import Stateful

FAST, SLOW = 16, 48  # gradients, of the exponential means
ERRORS = 4.0  # standard errors of the difference of both means, at which the loss has risen


class LossRise(Stateful):
    """Detector of a rise of the loss.

    The loss has risen if its mean over about 16 gradients exceeds its least mean over about 48, since `begin`, by 4
    standard errors. The variance of a loss is half the mean square of the difference of two losses in a row, which a
    fall of the loss does not change.

    Example:
        >>> rise = LossRise()
        >>> [rise.accept(1.0 + 0.1 * (i % 2)) for i in range(48)].count(True)
        0
        >>> rise.begin()
        >>> [rise.accept(1.3 + 0.1 * (i % 2)) for i in range(48)].index(True)
        3
    """

    _saved = ("_count", "_latest", "_fast", "_slow", "_variance", "_least")

    def __init__(self) -> None:
        self._count = 0
        self._latest = self._fast = self._slow = self._variance = 0.0
        self._least = inf

    def begin(self) -> None:
        """Compare the losses from now on with the mean of now."""
        self._least = self._slow if self._count else inf

    def accept(self, loss: float) -> bool:
        """Add the loss of an accepted gradient; return whether the loss has risen."""
        if self._count:
            square = (loss - self._latest) ** 2 / 2
            self._variance += (square - self._variance) / min(self._count, SLOW)
        self._count += 1
        self._latest = loss
        self._fast += (loss - self._fast) / min(self._count, FAST)
        self._slow += (loss - self._slow) / min(self._count, SLOW)
        self._least = min(self._least, self._slow)
        error = sqrt(self._variance * (1 / (2 * FAST - 1) + 1 / (2 * SLOW - 1)))
        return self._count >= FAST and self._fast > self._least + ERRORS * error
