"""The tensors of a model in flat, contiguous vectors: in each slice one a dtype for parameters, and so for buffers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from paceline.core.sharding import boundaries
from paceline.jobs.job import trainable

ALIGNMENT_BYTES = 64


class FlatBuffers:
    """One copy of a model's trainable parameters and buffers, or a gradient with the changes of the buffers.

    Attributes:
        memory: uint8 [nbytes], which everything else is a view of.
        flat_parameters: one 1-D tensor a slice and dtype.
        flat_buffers: one 1-D tensor a slice and dtype.
        parameters: one view a trainable parameter of the layout, in the model's order.
        buffers: one view a buffer of the layout, in the model's order.
        written: which parameters' views may hold something other than zero.
    """

    def __init__(self, layout: FlatLayout, memory: Tensor) -> None:
        self.memory = memory
        self.flat_parameters = [flat for section, _ in layout.sections for flat in section.flats(memory)]
        self.flat_buffers = [flat for _, section in layout.sections for flat in section.flats(memory)]
        self.parameters = layout.parameter_views(self.flat_parameters)
        self.buffers = layout.buffer_views(self.flat_buffers)
        self.written = set(range(len(self.parameters)))

    def copy_(self, other: FlatBuffers) -> None:
        """Copy everything from another set of vectors, possibly on another device."""
        words, theirs = self.memory.view(torch.int64), other.memory.view(torch.int64)  # faster than bytes
        words.copy_(theirs, non_blocking=True)


class FlatLayout:
    """Where each tensor of a model stands in its vectors.

    Frozen parameters are left out: nobody changes them, so every replica keeps its own. A slice has whole tensors that
    follow one another, parameters first and then buffers, and lies in one piece.

    Args:
        model: with at least one trainable parameter.
        shards: number of shards of nearly equal bytes, >= 1.
        only: the slice that is laid out, alone; None for all of them.

    Attributes:
        parameters: which of the model's trainable parameters are laid out.
        buffers: which of its buffers are.
        shard_ranges: the bytes of each slice.
        nbytes: of all.
        gradient_nbytes: of all without buffers.

    Raises:
        UsageError: the model has fewer tensors than slices.

    >>> layout = FlatLayout(nn.Linear(1000, 1000), shards=2)
    >>> [place.stop - place.start for place in layout.shard_ranges]
    [4000000, 4032]
    >>> FlatLayout(nn.Linear(1000, 1000), shards=2, only=1).parameters
    range(1, 2)
    """

    def __init__(self, model: nn.Module, shards: int = 1, only: int | None = None) -> None:
        parameters, buffers = trainable(model), list(model.buffers())
        count = len(parameters)
        spans = list(pairwise(boundaries([tensor.nbytes for tensor in [*parameters, *buffers]], shards)))
        if only is not None:
            spans = [spans[only]]
        (first, _), (_, last) = spans[0], spans[-1]
        self.parameters = range(min(first, count), min(last, count))
        self.buffers = range(max(first - count, 0), max(last - count, 0))
        self.sections: list[tuple[_Section, _Section]] = []
        self.shard_ranges: list[slice] = []
        self.nbytes = self.gradient_nbytes = 0
        for start, end in spans:
            ours = _Section(parameters[start:end], self.nbytes)
            beside = _Section(buffers[max(start - count, 0) : max(end - count, 0)], ours.end)
            self.sections.append((ours, beside))
            self.shard_ranges.append(slice(self.nbytes, beside.end))
            self.gradient_nbytes += ours.end - self.nbytes
            self.nbytes = beside.end

    def allocate(self, device: torch.device | str = "cpu") -> FlatBuffers:
        """Return vectors of zeros."""
        return FlatBuffers(self, torch.zeros(self.nbytes, dtype=torch.uint8, device=device))

    def parameter_views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return flat vectors as one view a parameter."""
        return _pieces([section for section, _ in self.sections], flats)

    def flatten_parameters(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return such flat vectors of one piece a parameter."""
        flats: list[Tensor] = []
        for section, _ in self.sections:
            ours, pieces = pieces[: section.count], pieces[section.count :]
            flats += [torch.cat([ours[i].reshape(-1) for i, _ in members]) for _, members in section.groups]
        return flats

    def buffer_views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return flat vectors as one view a buffer."""
        return _pieces([section for _, section in self.sections], flats)


def flat_copy(model: nn.Module, shards: int) -> FlatBuffers:
    """Return the parameters and buffers of a model in vectors of so many slices."""
    vectors = FlatLayout(model, shards).allocate()
    tensors = [*trainable(model), *model.buffers()]
    for view, tensor in zip([*vectors.parameters, *vectors.buffers], tensors, strict=True):
        view.copy_(tensor.detach())
    return vectors


class _Section:
    """Tensors that follow one another, by their dtypes."""

    def __init__(self, tensors: Sequence[Tensor], start: int) -> None:
        by_dtype: dict[torch.dtype, list[tuple[int, torch.Size]]] = {}
        for i, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append((i, tensor.shape))
        self.count = len(tensors)
        self.groups = list(by_dtype.items())
        self._places: list[tuple[torch.dtype, slice]] = []
        self.end = _aligned(start)
        for dtype, members in self.groups:
            nbytes = sum(prod(shape) for _, shape in members) * dtype.itemsize
            self._places.append((dtype, slice(self.end, self.end + nbytes)))
            self.end = _aligned(self.end + nbytes)

    def flats(self, memory: Tensor) -> list[Tensor]:
        return [memory[place].view(dtype) for dtype, place in self._places]


def _pieces(sections: Sequence[_Section], flats: Sequence[Tensor]) -> list[Tensor]:
    waiting = iter(flats)
    pieces: list[Tensor] = []
    for section in sections:
        views: dict[int, Tensor] = {}
        for _, members in section.groups:
            for (i, shape), piece in zip(
                members, next(waiting).split([prod(shape) for _, shape in members]), strict=True
            ):
                views[i] = piece.view(shape)
        pieces += [views[i] for i in range(section.count)]
    return pieces


def copy_checked(target: Tensor, source: object) -> None:
    """Copy a tensor into another one of the same shape and dtype; `copy_` alone would broadcast and convert.

    Raises:
        ValueError: they are not alike.
    """
    if not isinstance(source, Tensor) or source.shape != target.shape or source.dtype != target.dtype:
        given = f"{source.dtype} {list(source.shape)}" if isinstance(source, Tensor) else type(source).__name__
        raise ValueError(f"a tensor is {given}, expected {target.dtype} {list(target.shape)}")
    target.copy_(source)


def bind(tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Let tensors of a model live in these views, without copying anything."""
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = view


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
