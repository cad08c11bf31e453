"""What the microbatches of one gradient tell about its variance."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor, nn


class Spread:
    """Watches the gradients of microbatches on their way into the sum, where they can no longer be told apart.

    A gradient g = sum_l p_l g_l of m microbatches, each with its share p_l of the samples, has the variance

        V(g) = (sum_l p_l ||g_l||^2 - ||g||^2) / (m - 1),

    without bias if the samples are drawn alike.

    Args:
        parameters: whose gradients are watched.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._squares: list[Tensor] = []
        self._mean_square = 0.0
        self._parts = 0
        for parameter in parameters:
            parameter.register_hook(self._watch)

    def begin(self) -> None:
        """Forget the gradient before."""
        self._squares.clear()
        self._mean_square = 0.0
        self._parts = 0

    def add(self, share: float) -> None:
        """Count the microbatch whose share of the loss has just gone backward."""
        if self._squares:
            self._mean_square += float(torch.stack(self._squares).sum()) / share
        self._squares.clear()
        self._parts += 1

    def variance(self, squared_norm: float) -> float:
        """Return the variance of the gradient of this squared norm; nan of a single microbatch."""
        if self._parts < 2:
            return nan
        return max(self._mean_square - squared_norm, 0.0) / (self._parts - 1)

    def _watch(self, gradient: Tensor) -> None:
        self._squares.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64) ** 2)
