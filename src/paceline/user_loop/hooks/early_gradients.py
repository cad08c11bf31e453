"""Gradients of a user's loop that are handed in while its backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.tensors.checksums import checksum
from paceline.tensors.squared_norms import squared_norm
from paceline.user_loop.worker.exchange import LoopTask


class _Early(NamedTuple):
    """Gradient as it was handed in.

    What a loop does through ``.data`` raises no version counter, and neither does a GradScaler. So values are compared.
    """

    gradient: Tensor
    squared_norm: Tensor
    checksum: Tensor

    def is_same(self, now: Tensor | None) -> bool:
        """Return whether this is the gradient now."""
        return now is self.gradient and torch.equal(checksum(now.detach()), self.checksum)


class EarlyGradients:
    """Gradients that are handed in as soon as they are complete, so that their sum may begin.

    A gradient with memory of its own stays there, which saves a copy; another one is copied into the buffers of the
    task. One that the loop changes before its step is copied then, and its sum is made anew. Such a loop hands in whole
    gradients from there on.

    Args:
        parameters: trained parameters of the model.
        passes: backward passes of a step, >= 1.
        task: returns the task of the loop; None without one.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], passes: int, task: Callable[[], LoopTask | None]) -> None:
        self._parameters = parameters
        self._passes = passes
        self._task = task
        self._of: LoopTask | None = None  # task that has them
        self._handed_in: dict[int, _Early] = {}  # by index of the parameter
        self._done = [0] * len(parameters)  # backward passes that have added to a gradient of this step
        self._hooks = [
            each.register_post_accumulate_grad_hook(partial(self._on_accumulated, i))
            for i, each in enumerate(parameters)
        ]

    def unchanged(self, task: LoopTask) -> dict[int, Tensor]:
        """Return the squared norms of the gradients that a task has as they are now, by index."""
        early = self._handed_in if task is self._of else {}
        now = {i: self._parameters[i].grad for i in early}
        found = {i: each.squared_norm for i, each in early.items() if each.is_same(now[i])}
        if any(now[i] is not None for i in early.keys() - found):
            self.close()
        return found

    def end(self, task: LoopTask, unchanged: Mapping[int, Tensor]) -> None:
        """End a step, and tell which of its gradients have been copied since, or dropped."""
        if task is self._of and task.on_ready is not None:
            for i in self._handed_in.keys() - unchanged:
                task.on_ready(i)
        self._of = None
        self._handed_in = {}
        self._done = [0] * len(self._parameters)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_accumulated(self, i: int, parameter: Tensor) -> None:
        self._done[i] += 1
        task, gradient = self._task(), parameter.grad
        if task is None or task.on_ready is None or gradient is None or gradient.is_sparse:
            return
        if task is not self._of:
            self._of = task
            self._handed_in = {}
        if self._done[i] == self._passes:
            values = gradient.detach()  # of a second derivative, too; costs less than to switch autograd off
            has_own_memory = values.untyped_storage().nbytes() == values.nbytes
            norm = task.on_ready(i, values) if has_own_memory else None
            if norm is None:
                task.gradient.parameters[i].copy_(values)
                norm = squared_norm(values)
                task.on_ready(i)
            task.gradient.written.add(i)
            self._handed_in[i] = _Early(gradient, norm, checksum(values))
