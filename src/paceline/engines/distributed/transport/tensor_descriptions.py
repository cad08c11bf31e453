"""Descriptions of tensors, dtype and shape, for a receiver that provides their memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from paceline.engines.distributed.transport.encoded import at_most, decoded, encoded

MAX_STATE_BYTES = 1 << 40
MAX_DIMENSIONS = 64
MOST_TENSORS = 1 << 15  # of a state
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not re.search("bits|q", str(dtype))
}
_Description = tuple[Annotated[str, Meta(max_length=20)], Annotated[list[int], Meta(max_length=MAX_DIMENSIONS)]]
_DESCRIPTIONS = at_most(dict[Annotated[str, Meta(max_length=1000)], _Description], MOST_TENSORS)


def describe(tensor: Tensor) -> tuple[str, list[int]]:
    """Return dtype and shape of a tensor, as they are sent."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def encoded_descriptions(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the descriptions of tensors by name, as they are sent."""
    return encoded({name: describe(tensor) for name, tensor in tensors.items()})


def allocate(content: bytes) -> dict[str, Tensor]:
    """Return tensors of such descriptions, whose memory the operating system provides as bytes arrive.

    Raises:
        ValueError: a tensor is not valid, or too large, or there are too many.

    >>> allocate(encoded_descriptions({"a": torch.zeros(2, 3)}))["a"].shape
    torch.Size([2, 3])
    """
    described = decoded(content, _DESCRIPTIONS, "tensors")
    try:
        return {name: _allocate(*each) for name, each in described.items()}
    except (KeyError, OverflowError, RuntimeError, TypeError) as error:
        raise ValueError(f"invalid tensors: {error}") from error


def _allocate(dtype: str, shape: list[int]) -> Tensor:
    if any(length < 0 for length in shape) or prod(shape) > MAX_STATE_BYTES:
        raise ValueError(f"tensor of shape {shape}")
    return torch.empty(shape, dtype=DTYPES[dtype])
