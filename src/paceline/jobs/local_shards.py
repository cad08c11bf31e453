"""Shards of tensors that several ranks hold together, as `fully_shard` makes them of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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


def gathered(text: str, model: nn.Module) -> list[str]:
    """Return the texts of all ranks that have the shards of a model, of one length; that of this rank for a whole one.

    All of these ranks call this together.
    """
    meshes: list[Any] = [getattr(each, "device_mesh", None) for each in model.parameters() if is_sharded(each)]
    if not meshes:
        return [text]
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=meshes[0].device_type)
    of_all = [torch.empty_like(own) for _ in range(meshes[0].size())]
    meshes[0].get_group().allgather([of_all], [own]).wait()
    return [bytes(each.tolist()).decode() for each in of_all]
