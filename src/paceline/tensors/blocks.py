"""Blocks of vectors, which stay in the caches of the cores while several operations use them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 2**17  # elements; larger blocks leave the second-level cache, and for smaller ones the calls take longer


def in_blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of vectors of one length, side by side: one share for each thread, whole vectors on a GPU.

    Operations on each element alone give the same bits for blocks of any size.
    """
    if vectors[0].is_cuda or len(vectors[0]) <= block_length():
        yield vectors
    else:
        yield from zip(*(vector.split(block_length()) for vector in vectors), strict=True)


def block_length() -> int:
    """Return the elements of a block."""
    return BLOCK * torch.get_num_threads()


def block_like(vector: Tensor) -> Tensor:
    """Return memory for the largest block of a vector."""
    [largest] = next(in_blocks(vector))
    return torch.empty_like(largest)
