"""Training loops of models that FSDP shards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from balance_models import Tied, data, net, sharded
from balance_updates import adam, epochs, loader_of, loop, plain
from fully_sharded import fully_shard


@loop
def fsdp2():
    model = sharded(net())
    return plain(model, adam(model), loader_of(data()))


@loop
def fsdp2_from_the_meta_device():
    with torch.device("meta"):
        model = net()
    model = sharded(model).to_empty(device="cpu")
    torch.manual_seed(0)
    for each in model:
        if isinstance(each, nn.Linear):
            each.reset_parameters()
    return plain(model, adam(model), loader_of(data()))


@loop
def fsdp2_frozen_and_clipped():
    model = net()
    model[0].requires_grad_(False)
    model = sharded(model)
    optimizer = adam(model)
    for x, y in epochs(loader_of(data())):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model


@loop
def fsdp2_tied():
    model = Tied()
    for each in model.blocks:
        fully_shard(each)
    model = fully_shard(model)
    return plain(model, adam(model), loader_of(data()))


@loop
def fsdp2_accumulation_with_clipping():
    model = sharded(net())
    optimizer = adam(model)
    for number, (x, y) in enumerate(epochs(loader_of(data()))):
        is_last = number % 3 == 2
        model.set_requires_gradient_sync(is_last)
        (mse_loss(model(x), y) / 3).backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return model


@loop
def fsdp2_compiled_blocks():
    model = net()
    for each in model:
        each.compile()
    model = sharded(model)
    return plain(model, adam(model), loader_of(data()))


@loop
def hsdp():
    shards = 2 if dist.get_world_size() > 2 else 1
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
    model = sharded(net(), mesh=mesh)
    return plain(model, adam(model), loader_of(data()))
