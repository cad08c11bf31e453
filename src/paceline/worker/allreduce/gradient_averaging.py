"""Gradient averaging: all-reduce SGD."""

from __future__ import annotations

from paceline.core.events import Apply, Step
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.worker.allreduce.base import AllReduceAlgorithm, Contribution
from paceline.worker.allreduce.vectors import add_counts, scale


class GradientAveraging(AllReduceAlgorithm):
    """Gradient averaging: all workers step with the mean of their gradients; weights and average are the same."""

    @property
    def weights(self) -> FlatBuffers:
        """Average."""
        return self.average

    @property
    def payload(self) -> FlatBuffers:
        """Gradient."""
        return self.gradient

    def contribute(self, squared_norm: float, share: float, update: Apply) -> Contribution:
        """Multiply the gradient by its share."""
        scale(self.gradient, share)
        add_counts(self.gradient, self.average, -1)
        return Contribution(finite=True)

    def apply_sum(self, total: FlatBuffers, shares: float, update: Apply, fragment: int | None) -> Step | None:
        """Make the same step as all other workers."""
        scale(total, 1 / shares)
        add_counts(total, self.average, 1)
        self.server.enqueue(total, weight=1)
        return self.server.apply(update)

    def advance(self, update: Apply) -> None:
        """Do nothing: `apply_sum` advances the schedule."""

    def reset_to_average(self) -> None:
        """Do nothing: the weights are the average."""
