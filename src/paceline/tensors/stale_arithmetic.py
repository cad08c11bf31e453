"""Arithmetic of delay compensation: sums and corrections over the vectors g, w_now and w_then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.policies.compensation.base import AdaptiveKnobs

BLOCK = 2**16  # elements; a few blocks fit into the cache of a core, so that intermediate results stay in it


class Corrected(NamedTuple):
    """Sums that the pass of a correction computes beside it.

    Attributes:
        squared_norm: ||g||^2 of the corrected gradient.
        squared_distance: ||D||^2.
    """

    squared_norm: float
    squared_distance: float


class StaleArithmetic(Protocol):
    """Operations on vectors of one length and dtype. D is w_now - w_then, and products are element by element.

    Attributes:
        name: library that computes, on which the rounding of sums depends.
    """

    name: str

    def squared_distance(self, now: Tensor, then: Tensor) -> float:
        """Return ||D||^2."""

    def squared_length(self, gradient: Tensor, now: Tensor, then: Tensor, scale: float) -> float:
        """Return ||scale g g D||^2."""

    def correct(self, gradient: Tensor, now: Tensor, then: Tensor, lambda_: float) -> Corrected:
        """Add lambda g g D to g in place."""

    def correct_adaptively(
        self, gradient: Tensor, now: Tensor, then: Tensor, mean_square: Tensor, knobs: AdaptiveKnobs
    ) -> Corrected:
        """Count g in the mean square, and add the adaptive correction to g in place.

        mean_square = m mean_square + (1 - m) g g, and the correction is lambda0 / sqrt(mean_square + epsilon) g g D.
        """


class BlockArithmetic:
    """Arithmetic in operations of the vectors, block by block."""

    name = "torch"

    def squared_distance(self, now: Tensor, then: Tensor) -> float:
        """Return ||D||^2."""
        return sum(squared_norm_of_block(one.sub(other)) for one, other in blocks(now, then))

    def squared_length(self, gradient: Tensor, now: Tensor, then: Tensor, scale: float) -> float:
        """Return ||scale g g D||^2."""
        return sum(
            squared_norm_of_block(a.sub(b).mul_(scale).mul_(g).mul_(g)) for g, a, b in blocks(gradient, now, then)
        )

    def correct(self, gradient: Tensor, now: Tensor, then: Tensor, lambda_: float) -> Corrected:
        """Add lambda g g D to g in place."""
        norm = distance = 0.0
        for g, a, b in blocks(gradient, now, then):
            d = a.sub(b)
            distance += squared_norm_of_block(d)
            norm += squared_norm_of_block(g.addcmul_(g, d.mul_(g), value=lambda_))
        return Corrected(norm, distance)

    def correct_adaptively(
        self, gradient: Tensor, now: Tensor, then: Tensor, mean_square: Tensor, knobs: AdaptiveKnobs
    ) -> Corrected:
        """Count g in the mean square, and add the adaptive correction to g in place."""
        norm = distance = 0.0
        for g, a, b, square in blocks(gradient, now, then, mean_square):
            d = a.sub(b)
            distance += squared_norm_of_block(d)
            square.mul_(knobs.m).addcmul_(g, g, value=1 - knobs.m)
            # `rsqrt` rounds both its root and its quotient to nearest; `sqrt` of torch does not.
            inverse_root = square.add(knobs.epsilon).rsqrt_()
            norm += squared_norm_of_block(g.addcmul_(d.mul_(g).mul_(g), inverse_root, value=knobs.lambda0))
        return Corrected(norm, distance)


def blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of vectors of one length, side by side."""
    return zip(*(vector.split(BLOCK) for vector in vectors), strict=True)


def squared_norm_of_block(vector: Tensor) -> float:
    """Return ||v||^2 of a block; half precision is summed in single precision, which does not overflow."""
    wide = vector.float() if vector.element_size() < 4 else vector
    return float(wide.dot(wide))
