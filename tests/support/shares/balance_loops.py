"""Training loops of many shapes, for ranks that are balanced."""

from contextlib import nullcontext
from functools import partial
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from balance_models import (
    Checkpointed,
    Unused,
    WithLoss,
    data,
    net,
)
from balance_updates import BATCH, adam, epochs, loader_of, loop, plain, trained, update


@loop
def plain_loop():
    model = DistributedDataParallel(net())
    return plain(model, adam(model), loader_of(data()))


@loop
def classes():
    model = DistributedDataParallel(net(out=5))
    return plain(model, adam(model), loader_of(data(classes=5)), cross_entropy)


@loop
def loader_with_processes():
    model = DistributedDataParallel(net())
    return plain(model, adam(model), loader_of(data(), num_workers=2, persistent_workers=True))


@loop
def own_batch_sampler():
    model, dataset = DistributedDataParallel(net()), data()
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, BATCH, drop_last=True))
    optimizer = adam(model)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        trained(model, optimizer, loader, lambda x, y: mse_loss(model(x), y))
    return model


@loop
def accumulation_with_clipping():
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    for number, (x, y) in enumerate(epochs(loader_of(data()))):
        is_last = number % 3 == 2
        with nullcontext() if is_last else model.no_sync():
            (mse_loss(model(x), y) / 3).backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return model


@loop
def forward_returns_loss():
    model = DistributedDataParallel(WithLoss())
    return trained(model, adam(model), epochs(loader_of(data())), model)


@loop
def forward_returns_loss_of_unused_parameters():
    model = DistributedDataParallel(WithLoss(), find_unused_parameters=True)
    return trained(model, adam(model), epochs(loader_of(data())), model)


@loop
def evaluation_in_between():
    model, held = DistributedDataParallel(net()), loader_of(data(64))
    optimizer = adam(model)
    for number, (x, y) in enumerate(epochs(loader_of(data()))):
        update(optimizer, lambda x=x, y=y: mse_loss(model(x), y))
        if number % 7 == 3:
            with torch.no_grad():
                assert [len(a) for a, _ in held] == [BATCH] * (64 // BATCH // dist.get_world_size())
                [model(a) for a, _ in held]
    return model


@loop
def scaler_with_infinities():
    model = DistributedDataParallel(net())
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    for number, (x, y) in enumerate(epochs(loader_of(data()))):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        if number == 4 and dist.get_rank() == 0:
            loss = loss * torch.tensor(float("inf"))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


@loop
def unused_parameters():
    model = DistributedDataParallel(Unused(), find_unused_parameters=True)
    return plain(model, adam(model), loader_of(data()))


@loop
def static_graph():
    model = DistributedDataParallel(net(), static_graph=True)
    return plain(model, adam(model), loader_of(data()))


@loop
def checkpointing():
    model = DistributedDataParallel(Checkpointed(False))
    return plain(model, adam(model), loader_of(data()))


@loop
def reentrant_checkpointing():
    model = DistributedDataParallel(Checkpointed(True))
    return plain(model, adam(model), loader_of(data()))


@loop
def batches_taken_ahead():
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    loader = loader_of(data())
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        batches = iter(loader)
        ready = next(batches, None)
        while ready is not None:
            (x, y), ready = ready, next(batches, None)
            update(optimizer, lambda x=x, y=y: mse_loss(model(x), y))
    return model


@loop
def accuracy_on_training_samples():
    model, loader = DistributedDataParallel(net()), loader_of(data())
    optimizer = adam(model)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            update(optimizer, lambda x=x, y=y: mse_loss(model(x), y))
            if number == 4 + epoch:
                sum(float(mse_loss(model.module(a).detach(), b)) for a, b in loader)
        sum(float(mse_loss(model.module(a).detach(), b)) for a, b in loader)
    return model


@loop
def a_batch_that_rank_0_looks_at():
    model, loader = DistributedDataParallel(net()), loader_of(data())
    optimizer = adam(model)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        if dist.get_rank() == 0:
            next(iter(loader))
        trained(model, optimizer, loader, lambda x, y: mse_loss(model(x), y))
    return model


@loop
def iteration_that_begins_before_the_model():
    batches = epochs(loader_of(data()))
    looked_at = iter(loader_of(data()))
    next(looked_at)
    first = next(batches)
    model = DistributedDataParallel(net())
    return trained(model, adam(model), chain([first], batches), lambda x, y: mse_loss(model(x), y))


@loop
def loader_that_only_its_iteration_holds():
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    for _ in range(3):
        trained(model, optimizer, islice(loader_of(data()), 9), lambda x, y: mse_loss(model(x), y))
    return model


@loop
def loaders_of_each_epoch_that_are_read_twice():
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    for _ in range(3):
        loader = loader_of(data())
        trained(model, optimizer, loader, lambda x, y: mse_loss(model(x), y))
        sum(float(mse_loss(model.module(a).detach(), b)) for a, b in loader)
    return model


@loop
def two_loaders():
    model = DistributedDataParallel(net())
    pairs = zip(epochs(loader_of(data())), epochs(loader_of(data())), strict=True)
    return trained(model, adam(model), pairs, lambda one, two: sum(mse_loss(model(x), y) for x, y in (one, two)))


@loop
def frozen_base_with_adapters():
    base = net()
    for each in base.parameters():
        each.requires_grad_(False)
    model = DistributedDataParallel(nn.Sequential(base, nn.Linear(3, 3)))
    return plain(model, adam(model), loader_of(data()))


@loop
def collectives_in_the_loop():
    model = DistributedDataParallel(net())
    optimizer = adam(model)

    def loss_of(x, y):
        dist.barrier()
        return mse_loss(model(x), y)

    for x, y in epochs(loader_of(data())):
        dist.all_reduce(update(optimizer, partial(loss_of, x, y)).detach())
    return model
