"""Training loops with losses that are weighed otherwise than by samples."""

import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from balance_models import MeanOfSequence, Sequences, data, net, pad, token_data, token_loss
from balance_updates import BATCH, adam, epochs, loader_of, loop, plain, trained
from on_device import DEVICE


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
    model, dataset, ranks = net(out=5).to(DEVICE), token_data(), dist.get_world_size()
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
