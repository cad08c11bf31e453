"""Kinds of DataLoaders: whose samples are dealt to the ranks, and which are read by each rank itself."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.errors import UsageError

ORDERS_OF_TORCH = (RandomSampler, SequentialSampler)


def draws_itself(loader: DataLoader[Any]) -> bool:
    """Return whether each rank reads its own samples, which have no numbers that could be dealt to the ranks."""
    return isinstance(loader.dataset, IterableDataset)


def stacks_samples(loader: DataLoader[Any]) -> bool:
    """Return whether a batch is a number of samples of one order; else a sampler gives whole batches."""
    return type(loader.batch_sampler) is BatchSampler


def own_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler of the user that orders samples, or batches; None for the orders of torch."""
    if not stacks_samples(loader):
        return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    sampler = loader.sampler
    return None if type(sampler) in ORDERS_OF_TORCH else sampler  # a subclass has another order


def check_loader(loader: DataLoader[Any]) -> None:
    """Check that the samples of a DataLoader can be dealt to the ranks, or are read by each rank itself.

    Raises:
        UsageError: a sampler deals the samples already, or gives no number of them.
    """
    if draws_itself(loader):
        return
    batches = loader.batch_sampler
    for each in (loader.sampler, getattr(batches, "sampler", None)):
        if isinstance(each, DistributedSampler):
            raise UsageError(
                "the loader has a DistributedSampler, but the coordinator deals the samples to the ranks: omit it, and "
                "give shuffle=True"
            )
    sampler = own_sampler(loader)
    if sampler is not None and not isinstance(sampler, Sized):
        raise UsageError(
            f"the loader has a {type(sampler).__name__}, which has no length, but the coordinator deals a number of "
            f"{'samples' if stacks_samples(loader) else 'batches'} per epoch: give it a method __len__"
        )
