"""Running mean of vectors, with a check in the same pass whether it is finite: by torch, or in compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.tensors.blocks import in_blocks
from paceline.tensors.compiled_loops import LEAST, TRIED, in_threads, loops_for, when_loaded
from paceline.tensors.finite import check_sum
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


def move_mean(mean: Tensor, new: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Move a running mean, in the fastest way that has the bits of torch.

    Args:
        mean: mean so far [n], changed in place; any content if the first weight is 1.
        new: vectors, each [n].
        weights: weight of each vector in the mean up to it, in (0, 1].

    Returns:
        Number [] that is finite only if all elements of the mean are.
    """
    loops = loops_of_mean(mean, len(mean))
    if loops is None:
        return _move_by_torch(mean, new, weights)
    return _move_in_loops(mean, new, weights, loops)


def loops_of_mean(tensor: Tensor, length: int) -> Any | None:
    """Return the compiled loops for a mean, which begin to load at the first call; None if torch has to compute it.

    Args:
        tensor: tensor of its dtype and device.
        length: elements of the mean, >= 0.
    """
    has_loops = length >= LEAST and tensor.device.type == "cpu"
    return when_loaded(exact_loops, tensor.dtype) if has_loops else None


def update_mean(mean: Tensor, new: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Move a running mean, so that no division is left for the update; the first gradient has weight 1."""
    if weights[0] == 1.0 and len(new) > 1:
        torch.lerp(new[0], new[1], weights[1], out=mean)
        new, weights = new[2:], weights[2:]
    elif weights[0] == 1.0:
        mean.copy_(new[0])
        new, weights = new[1:], weights[1:]
    for each, weight in zip(new, weights, strict=True):
        mean.lerp_(each, weight)


@cache
def exact_loops(dtype: torch.dtype) -> Any | None:
    """Return the compiled loops if they have the bits of torch; None if they do not, or if numba is not installed."""
    compiled = loops_for(dtype)
    if compiled is None:
        return None
    random = torch.Generator().manual_seed(0)
    vectors = [torch.randn(TRIED, generator=random, dtype=dtype) for _ in range(compiled.VECTORS + 3)]
    for weights in ([1.0], [1.0, 0.7, 0.2, 0.4, 0.3, 0.6], [0.5, 0.1, 0.8]):
        ours, theirs = vectors[-1].clone(), vectors[-1].clone()
        update_mean(theirs, vectors[: len(weights)], weights)
        _move_in_loops(ours, vectors[: len(weights)], weights, compiled)
        if not torch.equal(ours, theirs):
            LOG.warning("the compiled loops of numba differ from torch for %s in means: torch is used", dtype)
            return None
    return compiled


def _move_by_torch(mean: Tensor, new: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    checks = []
    for block, *blocks in in_blocks(*[mean, *new]):
        update_mean(block, blocks, weights)
        checks.append(check_sum(block))
    return torch.stack(checks).sum()


def _move_in_loops(mean: Tensor, new: Sequence[Tensor], weights: Sequence[float], loops: Any) -> Tensor:
    length = -(-len(mean) // torch.get_num_threads())
    parts = zip(*(each.split(length) for each in (mean, *new)), strict=True)

    def move(part: Sequence[Tensor]) -> float:
        target, *vectors = (each.numpy() for each in part)
        check = 0.0
        for first in range(0, len(vectors), loops.VECTORS):
            few = tuple(vectors[first : first + loops.VECTORS])
            shares = weights[first : first + loops.VECTORS]
            loop = loops.begin_mean if shares[0] == 1.0 else loops.move_mean
            check = loop(target, few, np.array([*shares, *[0.0] * (loops.VECTORS - len(few))], target.dtype))
        return check

    return torch.tensor(sum(in_threads(move, parts)))
