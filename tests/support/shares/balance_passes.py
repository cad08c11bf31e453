"""Training loops with backward passes other than that of one loss, or models other than one."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from balance_models import (
    KeepsLoss,
    data,
    net,
)
from balance_updates import adam, epochs, loader_of, loop, plain, trained, update
from on_device import DEVICE


@loop
def penalty_on_parameters():
    model = DistributedDataParallel(net())
    batches = epochs(loader_of(data()))
    return trained(model, adam(model), batches, lambda x, y: mse_loss(model(x), y) + 1e-2 * penalty_of(model))


def penalty_of(model):
    return sum(each.pow(2).sum() for each in model.parameters())


@loop
def penalty_in_its_own_pass():
    """The reducer does not sum this gradient, which is the same on all ranks."""
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    for x, y in epochs(loader_of(data())):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        (1e-2 * penalty_of(model) + 1e-2 * (model.module[2].weight @ model.module[2].weight.T).abs().mean()).backward()
        optimizer.step()
    return model


@loop
def local_models_by_their_own_passes():
    """The temperature of a soft actor-critic, and a probe that rank 0 trains alone."""
    model, temperature, probe = DistributedDataParallel(net()), nn.Parameter(torch.zeros(1, device=DEVICE)), net(3, 1)
    optimizer, *local = adam(model), *(torch.optim.SGD(each, lr=0.1) for each in ([temperature], probe.parameters()))
    for x, y in epochs(loader_of(data())):
        update(local[0], lambda: -temperature.mean())
        update(optimizer, lambda x=x, y=y: temperature.exp().detach() * mse_loss(model(x), y))
        if dist.get_rank() == 0:
            update(local[1], lambda: probe(torch.ones(5, 3)).mean())
    return nn.ModuleList([model, nn.ParameterList([temperature])])


@loop
def gradient_penalty_in_its_own_pass():
    model = DistributedDataParallel(net(out=1), find_unused_parameters=True)
    optimizer = adam(model)
    for x, _ in epochs(loader_of(data())):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        out = model(x.requires_grad_())
        (gradient_of(out, x).pow(2).sum(1).mean() + 0 * out.mean()).backward()
        optimizer.step()
    return model


@loop
def output_used_twice():
    model = DistributedDataParallel(net())
    return plain(model, adam(model), loader_of(data()), lambda out, y: mse_loss(out, y) + 0.3 * out.abs().mean())


@loop
def gan():
    generator, critic = DistributedDataParallel(net()), DistributedDataParallel(net(3, 1))
    one, two = adam(generator), adam(critic)

    def loss_of_critic(x, y):
        return mse_loss(critic(y), y.new_ones(len(y), 1)) + critic(generator(x).detach()).pow(2).mean()

    for x, y in epochs(loader_of(data())):
        update(two, partial(loss_of_critic, x, y))
        update(one, lambda x=x: mse_loss(critic(generator(x)), x.new_ones(len(x), 1)))
    return nn.ModuleList([generator, critic])


@loop
def gradient_penalty():
    model = DistributedDataParallel(net(out=1))

    def loss_of(x, _):
        out = model(x.requires_grad_())
        return out.pow(2).mean() + (gradient_of(out, x).norm(dim=1) - 1).pow(2).mean()

    return trained(model, adam(model), epochs(loader_of(data())), loss_of)


def gradient_of(out, x):
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return gradient


@loop
def output_fed_back():
    model = DistributedDataParallel(net(6, 6))
    return trained(model, adam(model), epochs(loader_of(data())), lambda x, _: mse_loss(model(model(x)), x))


@loop
def loss_kept_in_module():
    model = DistributedDataParallel(KeepsLoss())
    return plain(model, adam(model), loader_of(data()), lambda out, y: mse_loss(out, y) + 0.1 * model.module.kept)


@loop
def closure():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in epochs(loader_of(data())):

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(evaluate)
    return model
