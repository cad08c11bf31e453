"""Epoch of the minibatches that a loop takes: the loop names it, or each iteration over the loader is the next one."""

from __future__ import annotations


class EpochCursor:
    """Epoch until whose end a loop takes minibatches.

    Attributes:
        epoch: number of the epoch, >= 0.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._is_named = False

    def name(self, epoch: int) -> None:
        """Set the epoch; from now on an iteration does not change it."""
        self.epoch = epoch
        self._is_named = True

    def begin_iteration(self, epoch: int) -> None:
        """Begin an iteration over the loader, whose first minibatch is of this epoch."""
        if not self._is_named:
            self.epoch = epoch
