"""Mean losses of whole minibatches, from the losses of their parts."""

from __future__ import annotations

from paceline.utils.state_dict import Stateful

ROUNDING = 1e-9


class MinibatchLosses(Stateful):
    """Mean losses of minibatches, made of the losses of gradients of shares of a minibatch, in their order.

    So the number of losses, and their variance, do not depend on how the samples of an update are divided.

    Example:
        >>> losses = MinibatchLosses()
        >>> losses.add(5.0, 1.0), losses.add(1.0, 0.5), losses.add(3.0, 0.75), losses.add(4.0, 0.75)
        ([5.0], [], [2.0], [3.75])
    """

    _saved = ("_share", "_sum")

    def __init__(self) -> None:
        self._share = 0.0  # of the minibatch in progress
        self._sum = 0.0  # of its losses times their shares

    def add(self, loss: float, share: float) -> list[float]:
        """Add the mean loss of a share of a minibatch, > 0; return those of the minibatches that are complete now."""
        if share == 1.0 and not self._share:
            return [loss]
        complete = []
        while self._share + share >= 1.0 - ROUNDING:
            used = min(1.0 - self._share, share)
            complete.append(self._sum + used * loss)
            share -= used
            self._share = self._sum = 0.0
        if share > ROUNDING:
            self._share += share
            self._sum += share * loss
        return complete
