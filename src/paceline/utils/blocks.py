"""Blocks of vectors, which stay in the cache of a core while several operations use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 2**16  # elements; a few blocks fit into the cache of a core


def in_blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of vectors of one length, side by side; a GPU gets whole vectors, as each operation is a launch."""
    if vectors[0].is_cuda:
        yield vectors
    else:
        yield from zip(*(vector.split(BLOCK) for vector in vectors), strict=True)
