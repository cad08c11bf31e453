"""Training loops of compiled models."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from balance_models import data, net
from balance_updates import adam, epochs, loader_of, loop, plain, update


@loop
def compiled_around():
    model = torch.compile(DistributedDataParallel(net()))
    return plain(model, adam(model), loader_of(data()))


@loop
def compiled_around_with_batches_taken_ahead():
    model = torch.compile(DistributedDataParallel(net()))
    optimizer, batches = adam(model), epochs(loader_of(data()))
    ready = next(batches)
    while ready is not None:
        (x, y), ready = ready, next(batches, None)
        update(optimizer, lambda x=x, y=y: mse_loss(model(x), y))
    return model


@loop
def compiled_inside():
    model = DistributedDataParallel(torch.compile(net()))
    return plain(model, adam(model), loader_of(data()))


@loop
def compiled_in_place():
    model = DistributedDataParallel(net())
    model.compile()
    return plain(model, adam(model), loader_of(data()))


@loop
def compiled_step():
    model = DistributedDataParallel(net())
    optimizer = adam(model)

    @torch.compile
    def step(x, y):
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss

    for x, y in epochs(loader_of(data())):
        optimizer.zero_grad()
        step(x, y)
        optimizer.step()
    return model


compiled_step.weigh = "samples"  # which its graph does not show
