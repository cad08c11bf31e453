"""Updates of the training loops that are balanced, and their catalogue."""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

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
