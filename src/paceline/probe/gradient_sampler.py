"""Squared norms of the local and the mean gradient, and the loss, of every 50th step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class GradientSampler:
    """Sampler of one rank's gradients; it reads them, and changes nothing.

    The local gradient is read when the rank's own graph is done, before DDP copies the mean over it. With
    ``gradient_as_bucket_view`` the sums are formed in the same memory, so hooks read each local gradient earlier.

    Args:
        every: steps between two samples; 0 for none.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._parameters: list[Tensor] = []
        self._uses_hooks = False
        self._loss: Tensor | None = None
        self._local: float | None = None
        self._squares: list[Tensor] = []
        self._hooks: list[Any] = []
        self._scaled: weakref.ref[Tensor] | None = None
        self._scale: Tensor | None = None

    def watch(self, parameters: Sequence[Tensor], is_view: bool) -> None:
        """Add the parameters of a model.

        Args:
            parameters: parameters that require a gradient.
            is_view: whether the gradients are views of DDP's buckets.
        """
        self._parameters += parameters
        self._uses_hooks |= is_view

    def remember_scale(self, scaled: object, scale: Tensor | None) -> None:
        """Remember a loss that a GradScaler has multiplied, and its factor."""
        if isinstance(scaled, Tensor):
            self._scaled = weakref.ref(scaled)
            self._scale = scale

    def begin(self, step: int, loss: Tensor) -> bool:
        """Return whether the backward pass that begins is sampled, and prepare for it."""
        if not self._every or step % self._every or not self._parameters:
            return False
        self._loss = loss
        self._local = None
        if self._uses_hooks:
            self._squares = []
            self._hooks = [each.register_post_accumulate_grad_hook(self._note) for each in self._parameters]
        return True

    def expect_nested(self) -> None:
        """Use hooks from now on: with nested backward passes DDP may put the mean in place before the graph is done."""
        if not self._uses_hooks:
            self._uses_hooks = True
            self._loss = None

    def graph_done(self) -> None:
        """Compute the norm of the local gradient."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._local = float(torch.stack(self._squares).sum()) if self._squares else self._squared_norm()
        self._squares = []

    def end(self) -> tuple[float, float, float] | None:
        """Return the loss and the squared norms of the local and the mean gradient; None for an unfinished pass."""
        loss, self._loss = self._loss, None
        local = self._local
        if loss is None or local is None:
            return None
        is_scaled = self._scaled is not None and self._scaled() is loss and self._scale is not None
        factor = float(self._scale) if is_scaled and self._scale is not None else 1.0
        value = float(loss.detach().mean()) / factor
        return value, local / factor**2, self._squared_norm() / factor**2

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._squares.append(parameter.grad.detach().float().square().sum())

    def _squared_norm(self) -> float:
        grads = [each.grad.detach() for each in self._parameters if each.grad is not None]
        if not grads:
            return 0.0
        norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
        return float(torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum())
