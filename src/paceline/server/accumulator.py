"""Running means of gradients in place, and the clipping of the finished one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clip(flats: Sequence[Tensor], norm: float, largest: float) -> None:
    """Shorten a vector of this norm to the largest one, as `torch.nn.utils.clip_grad_norm_` does."""
    factor = largest / (norm + 1e-6)
    if factor < 1.0:
        for flat in flats:
            flat.mul_(factor)


def move(mean: Tensor, new: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Move a running mean, so that nothing is left to divide at the update; the first one ever has weight 1."""
    if weights[0] == 1.0 and len(new) > 1:
        torch.lerp(new[0], new[1], weights[1], out=mean)
        new, weights = new[2:], weights[2:]
    elif weights[0] == 1.0:
        mean.copy_(new[0])
        new, weights = new[1:], weights[1:]
    for each, weight in zip(new, weights, strict=True):
        mean.lerp_(each, weight)


def add_up(total: Tensor, new: Sequence[Tensor], begin: bool) -> None:
    """Add integers; of booleans, keep the newest."""
    if total.dtype == torch.bool:
        total.copy_(new[-1])
        return
    if begin:
        total.zero_()
    for each in new:
        total.add_(each)
