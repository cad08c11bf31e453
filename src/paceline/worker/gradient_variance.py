"""What the microbatches of one gradient tell about its variance."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor, nn


class MicrobatchVariance:
    """Watches the gradients of microbatches on their way into the sum, where they can no longer be told apart.

    Args:
        parameters: whose gradients are watched.

    Attributes:
        mean_square: sum_l p_l ||g_l||^2 of the microbatches so far, each with its share p_l of the samples.
        parts: how many they are.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._squares: list[Tensor] = []
        self.mean_square = 0.0
        self.parts = 0
        for parameter in parameters:
            parameter.register_hook(self._watch)

    def begin(self) -> None:
        """Forget the gradient before."""
        self._squares.clear()
        self.mean_square = 0.0
        self.parts = 0

    def add(self, share: float) -> None:
        """Count the microbatch whose share of the loss has just gone backward."""
        if self._squares:
            self.mean_square += float(torch.stack(self._squares).sum()) / share
        self._squares.clear()
        self.parts += 1

    def _watch(self, gradient: Tensor) -> None:
        self._squares.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64) ** 2)


def variance(mean_square: float, squared_norm: float, parts: int) -> float:
    """Return the variance of a gradient, from its microbatches; nan of fewer than two.

    A gradient g = sum_l p_l g_l of m microbatches, each with its share p_l of the samples, has the variance

        V(g) = (sum_l p_l ||g_l||^2 - ||g||^2) / (m - 1),

    without bias if the samples are drawn alike.

    Args:
        mean_square: sum_l p_l ||g_l||^2.
        squared_norm: ||g||^2.
        parts: m.
    """
    if parts < 2:
        return nan
    return max(mean_square - squared_norm, 0.0) / (parts - 1)
