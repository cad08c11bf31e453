"""Parts of a `torch.utils.data.DataLoader` that a job uses, and the settings that it ignores."""

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
    """Parts of a DataLoader that a job uses.

    Attributes:
        data: data set.
        batch_size: samples per batch, >= 1.
        collate: collate function, None for torch's default.
        workers: processes that prepare batches, >= 0.
        prefetch: batches that each process prepares ahead, None without processes.
        sampler: custom sampler, None for a sequential or shuffling one, and for a DistributedSampler.
        ignored: settings without a counterpart in a job, as phrases.
    """

    data: Dataset[Any]
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    workers: int
    prefetch: int | None
    sampler: Sampler[int] | None
    ignored: tuple[str, ...]


def loader_parts(loader: DataLoader[Any], what: str, sampling: Literal["replacement", "epoch"] | None) -> LoaderParts:
    """Return the parts of a DataLoader.

    Args:
        loader: DataLoader of the user.
        what: name of the argument for errors, such as "job mine: data".
        sampling: sampling of the training data; None for evaluation data, which are read once in order.

    Raises:
        UsageError: the DataLoader has a custom batch sampler, no batches, or a sampler for the part of one rank.

    >>> loader_parts(DataLoader(range(8), batch_size=4, pin_memory=True), "job j: eval_data", None).ignored
    ('pin_memory=True',)
    """
    own_batches = type(loader.batch_sampler) not in (BatchSampler, type(None))
    if loader.batch_size is None:
        given = f"batch_sampler={type(loader.batch_sampler).__name__}" if own_batches else "batch_size=None"
        raise UsageError(
            f"{what} is a DataLoader with {given}, but a job makes minibatches of equal size itself: give a DataLoader "
            "with batch_size, or data=loader.dataset with batch_size and, for another order, sampler"
        )
    if isinstance(loader.sampler, DistributedSampler) and type(loader.sampler) is not DistributedSampler:
        raise UsageError(
            f"{what} is a DataLoader with a {type(loader.sampler).__name__}, which selects the samples of one rank, "
            "but the job shares the data among the workers itself: give the sampler of a single process"
        )
    is_custom = not isinstance(loader.dataset, IterableDataset) and not _is_of_a_job(loader, sampling)
    return LoaderParts(
        data=loader.dataset,
        batch_size=loader.batch_size,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        workers=loader.num_workers,
        prefetch=loader.prefetch_factor,
        sampler=loader.sampler if is_custom else None,  # type: ignore[arg-type]  # a sampler, or another iterable
        ignored=(*_order(loader, sampling), *_settings(loader)),
    )


def _is_of_a_job(loader: DataLoader[Any], sampling: str | None) -> bool:
    """Return whether a job has the order of a sampler itself; that of a subclass is unknown."""
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        draws_all = len(sampler) == len(sampler.data_source) == len(loader.dataset)  # type: ignore[arg-type]  # sized
        return draws_all and (not sampler.replacement or sampling == "replacement")
    if type(sampler) is SequentialSampler:
        return len(sampler) == len(loader.dataset)  # type: ignore[arg-type]  # map-style
    return isinstance(sampler, DistributedSampler)


def _order(loader: DataLoader[Any], sampling: str | None) -> Iterator[str]:
    if isinstance(loader.dataset, IterableDataset):
        return
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        yield "its DistributedSampler (the job shares the data among the workers itself)"
    elif sampling is None and isinstance(sampler, RandomSampler):
        yield "shuffle=True (evaluation reads the samples in order)"
    elif sampling is not None and isinstance(sampler, SequentialSampler):
        yield "shuffle=False (minibatches are drawn at random)"
    elif sampling == "replacement" and isinstance(sampler, RandomSampler) and not sampler.replacement:
        yield "shuffle=True (minibatches are drawn with replacement; for shuffled epochs give sampling='epoch')"
    if sampling is None and loader.drop_last:
        yield "drop_last=True (evaluation reads every sample)"
    if sampling is None and loader.num_workers:
        yield f"num_workers={loader.num_workers} (evaluation loads its batches in the main thread)"
    if sampling == "epoch" and not loader.drop_last and len(sampler) % (loader.batch_size or 1):  # type: ignore[arg-type]
        yield "drop_last=False (an epoch leaves out the samples after its last whole minibatch)"


def _settings(loader: DataLoader[Any]) -> Iterator[str]:
    if loader.pin_memory:
        yield "pin_memory=True"
    if loader.worker_init_fn is not None:
        yield "worker_init_fn"
    if loader.generator is not None:
        yield "generator (the seed of the run is used)"
    if loader.timeout:
        yield f"timeout={loader.timeout:g}"
