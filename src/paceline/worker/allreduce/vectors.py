"""Sums of flat buffers: numbers are added; booleans say what has changed, and are combined by exclusive or."""

from __future__ import annotations

from typing import Literal

import torch

from paceline.tensors.flat_buffers import FlatBuffers, is_a_mean

Sign = Literal[1, -1]


def add_payload(total: FlatBuffers, payload: FlatBuffers, *, is_first: bool) -> None:
    """Add a payload to the sum, or begin the sum with it."""
    if is_first:
        total.copy_(payload)
        return
    total.written |= payload.written
    add_vectors(total, payload)


def add_vectors(total: FlatBuffers, vectors: FlatBuffers, sign: Sign = 1) -> None:
    """Add or subtract vectors, of which one has changes; a boolean that has changed is the other value."""
    for sums, each in pairs(total, vectors):
        _add(sums, each, sign)


def add_counts(vectors: FlatBuffers, others: FlatBuffers, sign: Sign) -> None:
    """Add whole numbers and booleans of other vectors, or subtract them: values minus values are changes."""
    for counts, each in zip(vectors.flat_buffers, others.flat_buffers, strict=True):
        if not is_a_mean(counts):
            _add(counts, each, sign)


def drop_counts(vectors: FlatBuffers, worker: int) -> None:
    """Set the changes of whole numbers and booleans to zero, unless they are those of worker 0."""
    for counts in vectors.flat_buffers:
        if worker and not is_a_mean(counts):
            counts.zero_()


def _add(sums: torch.Tensor, each: torch.Tensor, sign: Sign) -> None:
    if sums.dtype == torch.bool:
        sums.logical_xor_(each)
    else:
        sums.add_(each, alpha=sign)


def pairs(*vectors: FlatBuffers) -> zip[tuple[torch.Tensor, ...]]:
    """Return the flat vectors of several buffers, side by side: parameters, then buffers."""
    return zip(*([*each.flat_parameters, *each.flat_buffers] for each in vectors), strict=True)


def scale(vectors: FlatBuffers, factor: float) -> None:
    """Multiply all means; integer and boolean buffers stay."""
    if factor == 1.0:
        return
    for flat in [*vectors.flat_parameters, *vectors.flat_buffers]:
        if is_a_mean(flat):
            flat.mul_(factor)
