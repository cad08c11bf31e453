"""Shards of tensors that several ranks hold together, as `fully_shard` makes them of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, whose class is slow to import."""
    return hasattr(tensor, "device_mesh")


@torch.no_grad()
def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor: its shard, a view, or the tensor itself if it is whole."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    local: Tensor = sharded.to_local()
    return local


def as_shard_of(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a tensor of this rank as the shard of one that is sharded as another one; itself for a whole one."""
    if not is_sharded(tensor) or local.shape != local_of(tensor).shape:
        return local
    of: Any = tensor
    made: Tensor = type(of).from_local(
        local, of.device_mesh, of.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return made
