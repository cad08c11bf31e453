"""Tensors of the user's loop: its gradient is handed in, and a version is copied into its model."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import isinf
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.jobs.local_shards import local_of
from paceline.tensors.kernels import await_kernels
from paceline.tensors.squared_norms import copy_with_squared_norm
from paceline.user_loop.server.description import plain_options
from paceline.user_loop.worker.exchange import LoopAnswer, LoopTask


@torch.no_grad()
def hand_in(
    task: LoopTask,
    parameters: Sequence[nn.Parameter],
    buffers: Sequence[Tensor],
    of: Container[nn.Parameter] | None = None,
    copied: Mapping[int, Tensor] = MappingProxyType({}),
) -> dict[int, Tensor]:
    """Move the gradient of the loop into the buffers of its task, so that a step finds none.

    Sparse gradients become dense ones here, and sparse ones again where a copy of the optimizer needs them.

    Args:
        task: the task.
        parameters: trained parameters of the model.
        buffers: buffers of the model.
        of: parameters whose gradients are moved; None for all.
        copied: squared norms of the gradients that are in the buffers already, by index of the parameter.

    Returns:
        Squared norm of the gradient of each parameter that has one, by index.
    """
    task.gradient.claim()
    stale, task.gradient.written = task.gradient.written, set()
    squared_norms = {}
    for i, (parameter, view) in enumerate(zip(parameters, task.gradient.parameters, strict=True)):
        if parameter.grad is not None and (of is None or parameter in of):
            gradient = local_of(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
            squared_norms[i] = copied[i] if i in copied else copy_with_squared_norm(gradient, view)
            task.gradient.written.add(i)
            parameter.grad = None
        elif i in stale:
            view.zero_()
    for theirs, ours in zip(task.model.buffers(), buffers, strict=True):
        theirs.copy_(ours)
    await_kernels(task.gradient.memory.device)  # another thread reads it, in another stream
    return squared_norms


@torch.no_grad()
def copy_version(version: list[Tensor], parameters: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> None:
    """Copy a version, parameters and then buffers, into the model of the user."""
    torch._foreach_copy_([*map(local_of, parameters), *buffers], version)  # one call in place of one for each tensor


def answer(
    loss: float | None, samples: int, optimizer: torch.optim.Optimizer, *, with_rates: bool = True
) -> LoopAnswer:
    """Return the answer to a task, with the options of the user's optimizer for its step unless the server's apply."""
    groups = enumerate(optimizer.param_groups if with_rates else [])
    options = [_finite(plain_options(number, group, optimizer.defaults)) for number, group in groups]
    rates = tuple(float(each.pop("lr")) for each in options)
    return LoopAnswer(loss=loss, samples=samples, learning_rates=rates, options=tuple(options))


def _finite(options: dict[str, Any]) -> dict[str, Any]:
    """Return options without an infinite one, as a limit that is off: no message has it, and the copy keeps it."""
    return {name: value for name, value in options.items() if not (isinstance(value, float) and isinf(value))}
