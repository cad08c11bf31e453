"""The tensors of a model in flat, contiguous vectors: one a dtype for parameters, one a dtype for buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor, nn

ALIGNMENT_BYTES = 64


class Vectors:
    """One copy of a model's trainable parameters and buffers, or a gradient with the changes of the buffers.

    Attributes:
        memory: uint8 [nbytes], which everything else is a view of.
        flat_parameters: one 1-D tensor a dtype.
        flat_buffers: one 1-D tensor a dtype.
        parameters: one view a trainable parameter, in the model's order.
        buffers: one view a buffer, in the model's order.
        written: which parameters' views may hold something other than zero.
    """

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        self.memory = memory
        self.flat_parameters, self.parameters = layout.parameters.views(memory)
        self.flat_buffers, self.buffers = layout.buffers.views(memory)
        self.written = set(range(len(self.parameters)))

    def copy_(self, other: Vectors) -> None:
        """Copy everything from another set of vectors, possibly on another device."""
        words, theirs = self.memory.view(torch.int64), other.memory.view(torch.int64)  # faster than bytes
        words.copy_(theirs, non_blocking=True)


class Layout:
    """Where each tensor of a model stands in its vectors.

    Frozen parameters are left out: nobody changes them, so every replica keeps its own.

    Args:
        model: with at least one trainable parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = _Section(trainable(model), start=0)
        self.buffers = _Section(model.buffers(), start=self.parameters.end)
        self.nbytes = self.buffers.end
        self.gradient_nbytes = self.parameters.end

    def allocate(self, device: torch.device | str = "cpu") -> Vectors:
        """Return vectors of zeros."""
        return Vectors(self, torch.zeros(self.nbytes, dtype=torch.uint8, device=device))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require a gradient, tied ones once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class _Section:
    def __init__(self, tensors: Iterable[Tensor], start: int) -> None:
        by_dtype: dict[torch.dtype, list[tuple[int, torch.Size]]] = {}
        self._count = 0
        for i, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append((i, tensor.shape))
            self._count += 1
        self._groups = list(by_dtype.items())
        self._starts: list[int] = []
        self.end = _aligned(start)
        for dtype, members in self._groups:
            self._starts.append(self.end)
            size = sum(prod(shape) for _, shape in members)
            self.end = _aligned(self.end + size * dtype.itemsize)

    def views(self, memory: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        flats: list[Tensor] = []
        views: list[Tensor] = [memory] * self._count
        for (dtype, members), start in zip(self._groups, self._starts, strict=True):
            sizes = [prod(shape) for _, shape in members]
            flat = memory[start : start + sum(sizes) * dtype.itemsize].view(dtype)
            flats.append(flat)
            for (i, shape), piece in zip(members, flat.split(sizes), strict=True):
                views[i] = piece.view(shape)
        return flats, views


def bind(tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Let tensors of a model live in these views, without copying anything."""
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = view


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
