"""Gradient of older parameters as flat vectors, with the arithmetic that compensators ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf, isfinite

from torch import Tensor

from paceline.core.sharding import FullVector
from paceline.policies.compensation.base import AdaptiveKnobs, StaleGradient
from paceline.tensors.stale_arithmetic import (
    BlockArithmetic,
    Corrected,
    StaleArithmetic,
    blocks,
    squared_norm_of_block,
)


class StaleVectors(StaleGradient):
    """Accepted gradient, with the current parameters and those that it was computed at, as flat vectors.

    Args:
        staleness: number of versions made since those parameters, >= 0.
        learning_rate: learning rate of the optimizer, the largest of its parameter groups, >= 0.
        squared_norm: squared norm of the whole gradient, >= 0.
        gradient: flat vectors of the gradient, one per dtype.
        now: flat vectors of the current parameters.
        then: flat vectors of the parameters that the gradient was computed at.
        whole: full vector of which these vectors are one shard; None if they are the full vector.
        arithmetic: operations on the vectors; None for those of the vectors themselves.
    """

    def __init__(
        self,
        *,
        staleness: int,
        learning_rate: float,
        squared_norm: float,
        gradient: Sequence[Tensor],
        now: Sequence[Tensor],
        then: Sequence[Tensor],
        whole: FullVector | None = None,
        arithmetic: StaleArithmetic | None = None,
    ) -> None:
        self.staleness = staleness
        self.learning_rate = learning_rate
        self.squared_norm = squared_norm
        self.gradient = gradient
        self._now = now
        self._then = then
        self._arithmetic = arithmetic or BlockArithmetic()
        self._squared_distance = None if staleness else 0.0
        self._distance_of_shard: float | None = None  # squared, and so is the next one
        self._norm_of_shard: float | None = None  # of the corrected gradient
        self._whole = whole or FullVector(sum(flat.numel() for flat in gradient), list)

    @property
    def elements(self) -> int:
        """Number of elements of the whole gradient."""
        return self._whole.elements

    def total(self, share: float) -> float:
        """Return a sum over all elements of the full vector, given the sum over the elements of this shard."""
        [total] = self._whole.summed([share])
        return total

    @property
    def squared_distance(self) -> float:
        """Squared distance ||w_now - w_then||^2; inf if it is not a number, because training has diverged."""
        if self._squared_distance is None:
            if self._distance_of_shard is None:
                pairs = zip(self._now, self._then, strict=True)
                self._distance_of_shard = sum(self._arithmetic.squared_distance(now, then) for now, then in pairs)
            total = self.total(self._distance_of_shard)
            self._squared_distance = total if total < inf else inf
        return self._squared_distance

    @property
    def is_finite(self) -> bool:
        """Whether all elements of the gradient are finite; one more pass, unless `correct` has changed it."""
        if self._norm_of_shard is None:
            pieces = (block for vector in self.gradient for (block,) in blocks(vector))
            self._norm_of_shard = sum(map(squared_norm_of_block, pieces))
        return isfinite(self.total(self._norm_of_shard))

    def squared_length(self, scale: float) -> float:
        """Return ||scale g g (w_now - w_then)||^2 of the full vector, with products element by element."""
        lengths = (self._arithmetic.squared_length(g, now, then, scale) for g, now, then in self._vectors())
        return self.total(sum(lengths))

    def zeros(self) -> list[Tensor]:
        """Return vectors of zeros, shaped like those of the gradient."""
        return [flat.new_zeros(flat.shape) for flat in self.gradient]

    def add_correction(self, lambda_: float) -> None:
        """Add lambda g g (w_now - w_then) to the gradient, with products element by element."""
        self._note([self._arithmetic.correct(g, now, then, lambda_) for g, now, then in self._vectors()])

    def add_adaptive_correction(self, mean_square: Sequence[Tensor], knobs: AdaptiveKnobs) -> None:
        """Count the gradient in the mean square of all gradients, and correct it if it is stale."""
        if not self.staleness:
            for square, gradient in zip(mean_square, self.gradient, strict=True):
                square.mul_(knobs.m).addcmul_(gradient, gradient, value=1 - knobs.m)
            return
        every = zip(self.gradient, self._now, self._then, mean_square, strict=True)
        self._note([self._arithmetic.correct_adaptively(g, now, then, square, knobs) for g, now, then, square in every])

    def _note(self, corrected: Sequence[Corrected]) -> None:
        self._norm_of_shard = sum(each.squared_norm for each in corrected)
        self._distance_of_shard = sum(each.squared_distance for each in corrected)

    def _vectors(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        return zip(self.gradient, self._now, self._then, strict=True)

    def correct(self, change: Callable[..., object], *beside: Sequence[Tensor]) -> None:
        """Change the gradient in one pass."""
        self._norm_of_shard = 0.0
        for vectors in self.blocks(*beside):
            change(*vectors)
            self._norm_of_shard += squared_norm_of_block(vectors[0])

    def blocks(self, *beside: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield blocks of g, of w_now - w_then and of further vectors, in one pass."""
        for vectors in zip(self.gradient, self._now, self._then, *beside, strict=True):
            for gradient, now, then, *others in blocks(*vectors):
                yield gradient, now.sub(then), *others
