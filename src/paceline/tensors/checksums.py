"""Checksum of a tensor: sums of its elements with fixed weights, by which a later change of the tensor is seen."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from paceline.tensors.squared_norms import PIECE


def checksum(tensor: Tensor) -> Tensor:
    """Return the sums c_p = sum_i w_i x_pi of the pieces p of a tensor, without waiting for a GPU.

    The weights w_i in [0.5, 1.5) all differ, so scaled, negated, exchanged and single elements change c. A change that
    is smaller than the rounding of a sum in single precision may be missed.

    Args:
        tensor: a dense tensor of real or complex floating-point numbers.
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    if flat.element_size() < 4:
        flat = flat.float()
    weights = _weights(flat.device, flat.dtype)
    whole = len(flat) // PIECE * PIECE
    last = flat[whole:].dot(weights[: len(flat) - whole])
    if not whole:
        return last
    return torch.cat([flat[:whole].view(-1, PIECE).mv(weights), last.view(1)])


@cache
def _weights(device: torch.device, dtype: torch.dtype) -> Tensor:
    drawn = torch.rand(PIECE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (0.5 + drawn).to(device, dtype)
