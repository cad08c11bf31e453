"""Flat, contiguous vectors of a model's tensors: per shard, one per dtype for parameters and one for buffers."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cached_property
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from paceline.core.sharding import shard_boundaries
from paceline.jobs.job import trainable

ALIGNMENT_BYTES = 64


class FlatBuffers:
    """Flat copy of a model's trainable parameters and buffers, or a gradient with the changes of the buffers.

    In a gradient, buffers of whole numbers and booleans have their new values: one worker's are taken over.

    Attributes:
        memory: uint8 [nbytes]; all other tensors are views of it.
        flat_parameters: 1-D tensors, one per shard and dtype.
        flat_buffers: 1-D tensors, one per shard and dtype.
        parameters: views, one per trainable parameter of the layout, in the model's order.
        buffers: views, one per buffer of the layout, in the model's order.
        written: indices of the views of the parameters that have a gradient: the others are zero.
    """

    def __init__(self, layout: FlatLayout, memory: Tensor) -> None:
        self.memory = memory
        self._layout = layout
        self.flat_parameters = [flat for section, _ in layout.sections for flat in section.flats(memory)]
        self.flat_buffers = [flat for _, section in layout.sections for flat in section.flats(memory)]
        self.parameters = layout.parameter_views(self.flat_parameters)
        self.buffers = layout.buffer_views(self.flat_buffers)
        self.written = set(range(len(self.parameters)))

    def release(self) -> None:
        """Free the memory until `claim`; nothing may be read or written in between."""
        self.memory.untyped_storage().resize_(0)

    def claim(self) -> None:
        """Take memory again if it is free, as zeros: no parameter has a gradient."""
        storage = self.memory.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self._layout.nbytes)
            self.memory.zero_()
            self.written = set()

    def copy_(self, other: FlatBuffers) -> None:
        """Copy all memory from other flat buffers, possibly on another device."""
        words = self.memory.view(torch.int64)  # faster than bytes
        words.copy_(other.memory.view(torch.int64), non_blocking=True)
        self.written = set(other.written)

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the model's parameters that have no gradient."""
        return tuple(number for i, number in enumerate(self._layout.parameters) if i not in self.written)

    def receive(self, missing: Container[int]) -> None:
        """Take over which parameters have no gradient, as `missing` of the sender.

        One that is not zero has a gradient all the same: that of other ranks, or what compressed messages had left out.
        """
        views = zip(self._layout.parameters, self.parameters, strict=True)
        self.written = {i for i, (number, view) in enumerate(views) if number not in missing or bool(view.any())}

    @cached_property
    def shards(self) -> tuple[FlatBuffers, ...]:
        """Views of the shards, each as flat buffers of its own layout."""
        layout = self._layout
        memories = [self.memory[each] for each in layout.shard_ranges]
        return tuple(map(FlatBuffers, layout.shard_layouts, memories))


class FlatLayout:
    """Memory layout: the position of each tensor of a model in its flat buffers.

    Frozen parameters are left out: no update changes them, so every replica has its own. A shard is one contiguous
    range of memory with whole, consecutive tensors, parameters first and then buffers.

    Args:
        model: model with at least one trainable parameter.
        shards: number of shards of nearly equal bytes, >= 1.
        only: index of the only shard in the layout, None for all shards.

    Attributes:
        parameters: indices of the model's trainable parameters in the layout.
        buffers: indices of the model's buffers in the layout.
        shard_ranges: byte range of each shard.
        shard_layouts: layout of each shard by itself.
        flat_ranges: range of each shard in the list of flat vectors of the parameters.
        nbytes: bytes of parameters and buffers.
        gradient_nbytes: bytes of the parameters.

    Raises:
        UsageError: the model has fewer tensors than shards.

    >>> layout = FlatLayout(nn.Linear(1000, 1000), shards=2)
    >>> [each.stop - each.start for each in layout.shard_ranges]
    [4000000, 4032]
    >>> FlatLayout(nn.Linear(1000, 1000), shards=2, only=1).parameters
    range(1, 2)
    """

    def __init__(self, model: nn.Module, shards: int = 1, only: int | None = None) -> None:
        parameters, buffers = trainable(model), list(model.buffers())
        count = len(parameters)
        spans = list(pairwise(shard_boundaries([tensor.nbytes for tensor in [*parameters, *buffers]], shards)))
        if only is not None:
            spans = [spans[only]]
        (first, _), (_, last) = spans[0], spans[-1]
        self.parameters = range(min(first, count), min(last, count))
        self.buffers = range(max(first - count, 0), max(last - count, 0))
        self.sections: list[tuple[_Section, _Section]] = []
        self.shard_ranges: list[slice] = []
        self.flat_ranges: list[slice] = []
        self.nbytes = self.gradient_nbytes = 0
        for start, end in spans:
            own = _Section(parameters[start:end], self.nbytes)
            after = _Section(buffers[max(start - count, 0) : max(end - count, 0)], own.end)
            self.sections.append((own, after))
            self.shard_ranges.append(slice(self.nbytes, after.end))
            first = self.flat_ranges[-1].stop if self.flat_ranges else 0
            self.flat_ranges.append(slice(first, first + len(own.groups)))
            self.gradient_nbytes += own.end - self.nbytes
            self.nbytes = after.end
        count = len(spans)
        self.shard_layouts = [FlatLayout(model, shards, each) for each in range(count)] if count > 1 else [self]

    def allocate(self, device: torch.device | str = "cpu") -> FlatBuffers:
        """Return flat buffers of zeros."""
        return FlatBuffers(self, torch.zeros(self.nbytes, dtype=torch.uint8, device=device))

    def parameter_views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return one view per parameter of flat vectors."""
        return _views([section for section, _ in self.sections], flats)

    def parameter_ranges(self) -> list[tuple[int, slice]]:
        """Return the number of the flat vector of each parameter, and its range there."""
        ranges: list[tuple[int, slice]] = []
        first = 0
        for section, _ in self.sections:
            ranges += section.ranges(first)
            first += len(section.groups)
        return ranges

    def flatten_parameters(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the flat vectors of one tensor per parameter."""
        flats: list[Tensor] = []
        for section, _ in self.sections:
            own, tensors = tensors[: section.count], tensors[section.count :]
            flats += [torch.cat([own[i].reshape(-1) for i, _ in members]) for _, members in section.groups]
        return flats

    def buffer_views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return one view per buffer of flat vectors."""
        return _views([section for _, section in self.sections], flats)


def flat_copy(model: nn.Module, shards: int) -> FlatBuffers:
    """Return a flat copy of a model's parameters and buffers in this number of shards."""
    flat = FlatLayout(model, shards).allocate()
    tensors = [*trainable(model), *model.buffers()]
    for view, tensor in zip([*flat.parameters, *flat.buffers], tensors, strict=True):
        view.copy_(tensor.detach())
    return flat


class _Section:
    """Consecutive tensors, grouped by dtype."""

    def __init__(self, tensors: Sequence[Tensor], start: int) -> None:
        by_dtype: dict[torch.dtype, list[tuple[int, torch.Size]]] = {}
        for i, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append((i, tensor.shape))
        self.count = len(tensors)
        self.groups = list(by_dtype.items())
        self._ranges: list[tuple[torch.dtype, slice]] = []
        self.end = _aligned(start)
        for dtype, members in self.groups:
            nbytes = sum(prod(shape) for _, shape in members) * dtype.itemsize
            self._ranges.append((dtype, slice(self.end, self.end + nbytes)))
            self.end = _aligned(self.end + nbytes)

    def flats(self, memory: Tensor) -> list[Tensor]:
        return [memory[each].view(dtype) for dtype, each in self._ranges]

    def ranges(self, first: int) -> list[tuple[int, slice]]:
        found: dict[int, tuple[int, slice]] = {}
        for number, (_, members) in enumerate(self.groups, first):
            start = 0
            for i, shape in members:
                found[i] = (number, slice(start, start + prod(shape)))
                start += prod(shape)
        return [found[i] for i in range(self.count)]


def _views(sections: Sequence[_Section], flats: Sequence[Tensor]) -> list[Tensor]:
    remaining = iter(flats)
    tensors: list[Tensor] = []
    for section in sections:
        views: dict[int, Tensor] = {}
        for _, members in section.groups:
            parts = next(remaining).split([prod(shape) for _, shape in members])
            for (i, shape), part in zip(members, parts, strict=True):
                views[i] = part.view(shape)
        tensors += [views[i] for i in range(section.count)]
    return tensors


def copy_checked(target: Tensor, source: object) -> None:
    """Copy a tensor into another one of the same shape and dtype; `copy_` alone would broadcast and convert.

    Raises:
        ValueError: shape or dtype differ.
    """
    if not isinstance(source, Tensor) or source.shape != target.shape or source.dtype != target.dtype:
        given = f"{source.dtype} {list(source.shape)}" if isinstance(source, Tensor) else type(source).__name__
        raise ValueError(f"a tensor is {given}, expected {target.dtype} {list(target.shape)}")
    target.copy_(source)


def is_a_mean(flat: Tensor) -> bool:
    """Return whether workers average these numbers; of whole numbers and booleans, one worker's are taken over."""
    return flat.is_floating_point() or flat.is_complex()


def write_difference(first: Tensor, second: Tensor, out: Tensor) -> None:
    """Write first - second, whose memory stays; an element that is infinite in both, as of an attention mask, gives 0.

    >>> write_difference(torch.tensor([3.0, -torch.inf]), torch.tensor([1.0, -torch.inf]), out := torch.empty(2))
    >>> out
    tensor([2., 0.])
    """
    torch.sub(first, second, out=out)
    if not out.sum().isfinite():
        out.masked_fill_(out.isnan() & second.isinf(), 0)


def bind(tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Make tensors of a model share the memory of these views, without a copy."""
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = view


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
