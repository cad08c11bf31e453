"""Ranks that hold one replica of a user's model together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.jobs.local_shards import is_sharded
from paceline.protocols.protocol import Plan
from paceline.server.zero_gradients import shortened
from paceline.user_loop.data.loader_checks import draws_itself, stacks_samples
from paceline.user_loop.data.loop_data import LoopData, UserLoop
from paceline.user_loop.data.pieces import check_pieces
from paceline.user_loop.several_optimizers import SeveralOptimizers
from paceline.utils.wording import join_words

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


def group_size_of(model: nn.Module, group: Any, rank: int) -> int:
    """Return the number of ranks that hold a replica of a model together; 1 for a model that each rank holds whole.

    Args:
        model: model of the user.
        group: mesh that the user has given; None to find it.
        rank: number of this rank.

    Raises:
        UsageError: the parameters are sharded in a way that paceline does not know.
    """
    sharded: dict[str, Any] = {name: each for name, each in model.named_parameters() if is_sharded(each)}
    if not sharded:
        if group is not None:
            raise UsageError(
                f"group={group!r}, but no parameter of the model is sharded: call fully_shard(model, mesh=group) "
                "before attach, or omit group"
            )
        return 1
    whole = [name for name, each in model.named_parameters() if each.requires_grad and name not in sharded]
    if whole:
        raise UsageError(
            f"{shortened(whole)} of the model {'is' if len(whole) == 1 else 'are'} not sharded, unlike others: call "
            "fully_shard(model) on the whole model, after its blocks"
        )
    meshes = {each.device_mesh for each in sharded.values()}
    [mesh, *others] = meshes
    if others or mesh.ndim > 1:
        raise UsageError(
            "the parameters of the model are on a mesh of several dimensions, or on several meshes, and fully_shard "
            "would sum gradients that paceline sums: give it one dimension, as "
            'fully_shard(model, mesh=init_device_mesh(device, (2, 4), mesh_dim_names=("replicate", "shard"))["shard"])'
        )
    if group is not None and group != mesh:
        raise UsageError(f"group={group!r}, but the model is sharded over {mesh!r}: give fully_shard the same mesh")
    if not all(each.is_shard() for parameter in sharded.values() for each in parameter.placements):
        raise UsageError(
            "a parameter of the model is replicated over its mesh, as with tensor parallelism: attach takes models "
            "that fully_shard has sharded"
        )
    ranks = mesh.mesh.flatten().tolist()
    size = len(ranks)
    first = rank - rank % size
    if ranks != list(range(first, first + size)):
        raise UsageError(
            f"the model is sharded over the ranks {ranks}, expected {size} in a row from {first}: let the last "
            'dimension of the mesh be that of the shards, as mesh_dim_names=("replicate", "shard")'
        )
    return size


def check_shards(plan: Plan, loop: UserLoop) -> None:
    """Check that ranks with shards can take part in a plan, by sums of their gradients without a server.

    Raises:
        UsageError: the plan needs a server, a step needs whole tensors, or a rank may have more samples than another.
    """
    if plan.allreduce is not None or plan.local_steps is not None:
        raise UsageError(f"{plan} for a model that fully_shard has sharded: its ranks sum gradients; type bsp")
    if isinstance(loop.optimizer, SeveralOptimizers):
        raise UsageError("several optimizers for a model that fully_shard has sharded: give one")
    kind = type(loop.optimizer).__name__
    if getattr(torch.optim, kind, None) is not type(loop.optimizer) or kind not in ELEMENTWISE:
        raise UsageError(
            f"the optimizer {kind} may need whole tensors, of which each rank has a shard: give one whose steps are by "
            f"element, as {join_words(ELEMENTWISE, 'or')}"
        )
    check_pieces(plan, loop)
    loader = loop.loader
    if loader is None or draws_itself(loader):
        return
    data = LoopData.of_loop(loop)
    left = (data.samples if data.drawn is None else data.drawn) % data.batch_size
    if not stacks_samples(loader) or (left % (loop.group_size * loop.accumulate) and not data.drop_last):
        raise UsageError(
            f"the last minibatch of an epoch has {left} samples, of which {loop.group_size} ranks of a worker have to "
            "have as many each: give the DataLoader drop_last=True"
        )
