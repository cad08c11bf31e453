"""A `torch.utils.data.DataLoader` taken apart: what a job uses of it, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from paceline.errors import UsageError


class LoaderParts(NamedTuple):
    """What a job takes over from a DataLoader.

    Attributes:
        data: the data set.
        batch_size: samples in a batch, >= 1.
        collate: None for torch's own.
        workers: processes that prepare batches, >= 0.
        prefetch: batches that each of them prepares ahead, None if there are none.
        sampler: one that is neither sequential, random nor distributed; None otherwise.
        left_out: settings that have no counterpart in a job, in words.
    """

    data: Dataset[Any]
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    workers: int
    prefetch: int | None
    sampler: Sampler[int] | None
    left_out: tuple[str, ...]


def take_apart(loader: DataLoader[Any], what: str, sampling: Literal["replacement", "epoch"] | None) -> LoaderParts:
    """Return the parts of a DataLoader.

    Args:
        loader: as the user made it.
        what: the argument, for errors: "job mine: data".
        sampling: of the training data; None for evaluation data, of which every sample is read once in order.

    Raises:
        UsageError: it has a batch sampler of its own, or none.

    >>> take_apart(DataLoader(range(8), batch_size=4, pin_memory=True), "job j: eval_data", None).left_out
    ('pin_memory=True',)
    """
    own_batches = type(loader.batch_sampler) not in (BatchSampler, type(None))
    if loader.batch_size is None:
        given = f"batch_sampler={type(loader.batch_sampler).__name__}" if own_batches else "batch_size=None"
        raise UsageError(
            f"{what} is a DataLoader with {given}, but a job makes minibatches of equal size itself; give a DataLoader "
            "with batch_size, or data=loader.dataset with batch_size and, for another order, sampler"
        )
    known = (RandomSampler, SequentialSampler, DistributedSampler)
    is_custom = not isinstance(loader.dataset, IterableDataset) and not isinstance(loader.sampler, known)
    return LoaderParts(
        loader.dataset,
        loader.batch_size,
        None if loader.collate_fn is default_collate else loader.collate_fn,
        loader.num_workers,
        loader.prefetch_factor,
        loader.sampler if is_custom else None,  # type: ignore[arg-type]  # a sampler, or another iterable
        (*_order(loader, sampling), *_settings(loader)),
    )


def _order(loader: DataLoader[Any], sampling: str | None) -> Iterator[str]:
    if isinstance(loader.dataset, IterableDataset):
        return
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        yield "its DistributedSampler (workers share the data by themselves)"
    elif sampling is None and isinstance(sampler, RandomSampler):
        yield "shuffle=True (evaluation reads the samples in order)"
    elif sampling is not None and isinstance(sampler, SequentialSampler):
        yield "shuffle=False (minibatches are drawn at random)"
    elif sampling == "replacement" and isinstance(sampler, RandomSampler) and not sampler.replacement:
        yield "shuffle=True (minibatches are drawn with replacement; for shuffled epochs give sampling='epoch')"
    if sampling is None and loader.drop_last:
        yield "drop_last=True (evaluation reads every sample)"
    if sampling is None and loader.num_workers:
        yield f"num_workers={loader.num_workers} (evaluation reads its batches in line)"
    if sampling == "epoch" and not loader.drop_last and len(sampler) % (loader.batch_size or 1):  # type: ignore[arg-type]
        yield "drop_last=False (an epoch leaves out the samples beyond its last whole minibatch)"


def _settings(loader: DataLoader[Any]) -> Iterator[str]:
    if loader.pin_memory:
        yield "pin_memory=True"
    if loader.worker_init_fn is not None:
        yield "worker_init_fn"
    if loader.generator is not None:
        yield "generator (the seed is that of the run)"
    if loader.timeout:
        yield f"timeout={loader.timeout:g}"
