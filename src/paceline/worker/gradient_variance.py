"""Variance of a gradient, estimated from its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor, nn

from paceline.tensors.squared_norms import squared_norm


class MicrobatchVariance:
    """Squared norms of the gradients of microbatches, measured by hooks before autograd adds them up.

    Args:
        parameters: parameters whose gradients are measured.

    Attributes:
        mean_square: sum_l p_l ||g_l||^2 of the microbatches so far, each with its share p_l of the samples.
        parts: number of microbatches so far.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._squares: list[Tensor] = []
        self.mean_square = 0.0
        self.parts = 0
        for parameter in parameters:
            parameter.register_hook(self._measure)

    def begin(self) -> None:
        """Begin a new gradient."""
        self._squares.clear()
        self.mean_square = 0.0
        self.parts = 0

    def add(self, share: float) -> None:
        """Add the microbatch of the last backward pass, with its share of the samples."""
        if self._squares:
            self.mean_square += float(torch.stack(self._squares).sum()) / share
        self._squares.clear()
        self.parts += 1

    def _measure(self, gradient: Tensor) -> None:
        self._squares.append(squared_norm(gradient.detach()))


def variance(mean_square: float, squared_norm: float, parts: int) -> float:
    """Return the variance of a gradient, estimated from its microbatches; nan for fewer than two.

    A gradient g = sum_l p_l g_l of m microbatches, each with its share p_l of the samples, has the variance

        V(g) = (sum_l p_l ||g_l||^2 - ||g||^2) / (m - 1),

    which is unbiased if all samples have the same distribution.

    Args:
        mean_square: sum_l p_l ||g_l||^2.
        squared_norm: ||g||^2.
        parts: m, >= 0.
    """
    if parts < 2:
        return nan
    return max(mean_square - squared_norm, 0.0) / (parts - 1)
