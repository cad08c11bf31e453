"""Training loops of many shapes, for ranks that are balanced."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from balance_models import (
    Checkpointed,
    KeepsLoss,
    MeanOfSequence,
    Sequences,
    Unused,
    WithLoss,
    data,
    net,
    pad,
    sharded,
    token_data,
    token_loss,
)

BATCH = 8
LOOPS = {}


def loop(function):
    LOOPS[function.__name__] = function
    return function


def loader_of(dataset, **options):
    sampler = DistributedSampler(dataset, seed=3)
    return DataLoader(dataset, batch_size=BATCH, sampler=sampler, **options)


def adam(model):
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def epochs(loader, count=2):
    for epoch in range(count):
        loader.sampler.set_epoch(epoch)
        yield from loader


def update(optimizer, loss_of):
    """Make an update by the gradient of a loss, which is computed after the gradients are set to zero."""
    optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    optimizer.step()
    return loss


def plain(model, optimizer, loader, loss_of=mse_loss):
    return trained(model, optimizer, epochs(loader), lambda x, y: loss_of(model(x), y))


def trained(model, optimizer, batches, loss_of):
    """Return the model after an update by each batch."""
    for batch in batches:
        update(optimizer, lambda batch=batch: loss_of(*batch))
    return model


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
def penalty_on_parameters():
    model = DistributedDataParallel(net())
    batches = epochs(loader_of(data()))
    return trained(model, adam(model), batches, lambda x, y: mse_loss(model(x), y) + 1e-2 * penalty_of(model))


def penalty_of(model):
    return sum(each.pow(2).sum() for each in model.parameters())


@loop
def forward_returns_loss():
    model = DistributedDataParallel(WithLoss())
    return trained(model, adam(model), epochs(loader_of(data())), model)


@loop
def forward_returns_loss_of_unused_parameters():
    model = DistributedDataParallel(WithLoss(), find_unused_parameters=True)
    return trained(model, adam(model), epochs(loader_of(data())), model)


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
    model, temperature, probe = DistributedDataParallel(net()), nn.Parameter(torch.zeros(1)), net(3, 1)
    optimizer, *local = adam(model), *(torch.optim.SGD(each, lr=0.1) for each in ([temperature], probe.parameters()))
    for x, y in epochs(loader_of(data())):
        update(local[0], lambda: -(temperature * torch.ones(4)).mean())
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
def gan():
    generator, critic = DistributedDataParallel(net()), DistributedDataParallel(net(3, 1))
    one, two = adam(generator), adam(critic)

    def loss_of_critic(x, y):
        return mse_loss(critic(y), torch.ones(len(y), 1)) + critic(generator(x).detach()).pow(2).mean()

    for x, y in epochs(loader_of(data())):
        update(two, partial(loss_of_critic, x, y))
        update(one, lambda x=x: mse_loss(critic(generator(x)), torch.ones(len(x), 1)))
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
def two_loaders():
    model = DistributedDataParallel(net())
    pairs = zip(epochs(loader_of(data())), epochs(loader_of(data())), strict=True)
    return trained(model, adam(model), pairs, lambda one, two: sum(mse_loss(model(x), y) for x, y in (one, two)))


@loop
def sum_over_own_count():
    model = DistributedDataParallel(net())
    return plain(model, adam(model), loader_of(data()), lambda out, y: (out - y).pow(2).sum() / len(y))


@loop
def sum_over_all():
    model = DistributedDataParallel(net())
    return plain(model, adam(model), loader_of(data()), lambda out, y: (out - y).pow(2).sum() / 1000)


@loop
def tokens():
    model = DistributedDataParallel(net(out=5))
    return plain(model, adam(model), loader_of(token_data()), token_loss)


def tokens_in_one_process():
    """Return the model of a process that takes all samples of an update, of which each token counts alike."""
    model, dataset, ranks = net(out=5), token_data(), dist.get_world_size()
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=3)
    loader = DataLoader(dataset, batch_size=BATCH * ranks, sampler=sampler)
    return plain(model, adam(model), loader, token_loss)


def masked_loss(out, y):
    """Return a sum over the rank's own number of tokens."""
    is_counted = y != -100
    losses = cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
    return (losses * is_counted.flatten()).sum() / is_counted.sum()


@loop
def masked_tokens():
    model = DistributedDataParallel(net(out=5))
    return plain(model, adam(model), loader_of(token_data()), masked_loss)


REFERENCES = {"tokens": tokens_in_one_process, "masked_tokens": tokens_in_one_process}


@loop
def sequences_of_unequal_length():
    model = DistributedDataParallel(MeanOfSequence())
    batches = epochs(loader_of(Sequences(200), collate_fn=pad))
    return trained(model, adam(model), batches, lambda x, counts: model(x, counts).pow(2).mean())


@loop
def frozen_base_with_adapters():
    base = net()
    for each in base.parameters():
        each.requires_grad_(False)
    model = DistributedDataParallel(nn.Sequential(base, nn.Linear(3, 3)))
    return plain(model, adam(model), loader_of(data()))


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


@loop
def fsdp2():
    model = sharded(net())
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
