"""Memory of tensors as bytes that a socket reads and writes, and their frames."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.engines.distributed.transport.readers import TENSOR


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as its bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def memory_of_tensor(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    return memoryview(as_bytes(tensor).numpy())  # type: ignore[arg-type]  # numpy arrays are buffers


def framed(number: int, tensor: Tensor) -> list[memoryview]:
    """Return the frame of a numbered tensor, and its bytes."""
    memory = memory_of_tensor(tensor)
    return [memoryview(TENSOR.pack(number, len(memory))), memory]


def checked(memory: memoryview, nbytes: int) -> memoryview:
    """Return memory for so many bytes.

    Raises:
        ValueError: it has another size.
    """
    if len(memory) != nbytes:
        raise ValueError(f"{nbytes} bytes, but {len(memory)} were expected")
    return memory
