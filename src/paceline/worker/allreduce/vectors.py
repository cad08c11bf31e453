"""Sums of flat buffers: numbers are added, booleans combined by `or`."""

from __future__ import annotations

from typing import Literal

import torch

from paceline.server.flat_buffers import FlatBuffers

Sign = Literal[1, -1]


def add_payload(total: FlatBuffers, payload: FlatBuffers, *, is_first: bool) -> None:
    """Add a payload to the sum, or begin the sum with it."""
    if is_first:
        total.copy_(payload)
        return
    add_vectors(total, payload)


def add_vectors(total: FlatBuffers, vectors: FlatBuffers, sign: Sign = 1) -> None:
    """Add or subtract vectors; booleans are combined by `or`, and stay in a subtraction."""
    for sums, each in pairs(total, vectors):
        if sums.dtype != torch.bool:
            sums.add_(each, alpha=sign)
        elif sign > 0:
            sums.logical_or_(each)


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


def is_a_mean(flat: torch.Tensor) -> bool:
    """Return whether workers average these numbers, and do not add them."""
    return flat.is_floating_point() or flat.is_complex()
