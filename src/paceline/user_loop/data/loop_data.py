"""Parts of a user's loop, and what the server and the job of a rank need of its DataLoader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from paceline.errors import UsageError
from paceline.jobs.job import Job
from paceline.jobs.sample_numbers import SampleNumbers
from paceline.utils.wording import counted

ATTACHED = "attached"  # name of the job of an attached loop


class UserLoop(NamedTuple):
    """Parts of a user's loop, as they were given to `pl.attach`.

    Attributes:
        model: model of the user.
        optimizer: optimizer of the user.
        loader: DataLoader of the user.
        accumulate: batches of each step, >= 1.
        clip_norm: largest norm of the mean gradient, None for no clipping.
        digest: digest of the first and the last sample of the data, empty if unknown.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any]
    accumulate: int
    clip_norm: float | None
    digest: str = ""


class LoopData(msgspec.Struct, frozen=True, kw_only=True):
    """Data of a loop, equal on all ranks.

    Attributes:
        samples: samples of the training data, >= 1.
        batch_size: samples in the minibatch of one step, >= 1.
        drop_last: whether an epoch leaves out the samples after the last whole minibatch.
        ahead: minibatches that each rank loads ahead, >= 0.
        shuffles: whether each epoch shuffles the samples.
        drawn: samples that each epoch draws at random, >= 1; None for an epoch of every sample once.
        replacement: whether they are drawn with replacement.
        digest: digest of the first and the last sample, empty if unknown.
    """

    samples: int
    batch_size: int
    drop_last: bool
    ahead: int
    shuffles: bool
    drawn: int | None
    replacement: bool
    digest: str

    @classmethod
    def of_loader(cls, loader: DataLoader[Any], accumulate: int, digest: str) -> LoopData:
        """Return the data of a loop whose steps take several batches of a DataLoader."""
        batches = loader.batch_sampler
        assert isinstance(batches, BatchSampler)
        order = batches.sampler
        assert isinstance(order, RandomSampler | SequentialSampler)
        samples = len(order.data_source)
        replacement = isinstance(order, RandomSampler) and order.replacement
        batch_size = batches.batch_size * accumulate
        return cls(
            samples=samples,
            batch_size=batch_size,
            drop_last=batches.drop_last or len(order) % batch_size < accumulate,  # no batch of a step may be empty
            ahead=-(-loader.num_workers * (loader.prefetch_factor or 0) // accumulate),
            shuffles=isinstance(order, RandomSampler),
            drawn=len(order) if replacement or len(order) != samples else None,
            replacement=replacement,
            digest=digest,
        )

    def job_settings(self) -> dict[str, Any]:
        """Return the arguments of a `LoopJob` with these data, of which it holds only the numbers of the samples."""
        data = SampleNumbers(self.samples, self.digest)
        return {
            "data": data,
            "sampler": self._sampler(data),
            "sampling": "epoch",
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "ahead": self.ahead,
        }

    def _sampler(self, data: SampleNumbers) -> Sampler[int] | None:
        """Return the order of an epoch, None for that of a job without a sampler: each sample once, shuffled."""
        if not self.shuffles:
            return SequentialSampler(data)
        if self.drawn is None:
            return None
        return RandomSampler(data, self.replacement, self.drawn)


@dataclass(frozen=True, kw_only=True, repr=False)
class LoopJob(Job):
    """Job of a user's loop.

    Attributes:
        drop_last: whether an epoch leaves out the samples after the last whole minibatch.
        ahead: minibatches that each rank loads ahead, >= 0.
    """

    drop_last: bool
    ahead: int

    @property
    def minibatches_ahead(self) -> int:
        """Minibatches that the coordinator forecasts for each rank."""
        return self.ahead

    def minibatches_per_epoch(self, shards: int = 1) -> int:
        """Return the number of minibatches in an epoch, of which the last one may be smaller."""
        samples = len(self.data if self.sampler is None else self.sampler)  # type: ignore[arg-type]  # sized here
        whole, rest = divmod(samples, self.batch_size)
        per_epoch = whole + (rest > 0 and not self.drop_last)
        if not per_epoch:
            raise UsageError(
                f"an epoch has {counted(samples, 'sample')}, too few for a step of {self.batch_size}: give the "
                "loader a smaller batch_size"
            )
        return per_epoch


def check_loader(loader: DataLoader[Any]) -> None:
    """Check that the samples of a DataLoader can be dealt to the ranks.

    Raises:
        UsageError: they have no numbers, or an order of their own.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "the loader is over an IterableDataset, whose samples have no numbers that the coordinator could deal to "
            "the ranks: give a map-style data set"
        )
    batches = loader.batch_sampler
    if batches is None:
        raise UsageError("the loader has no batch_size, by which the coordinator deals the samples: give one")
    if type(batches) is not BatchSampler:
        raise UsageError(
            f"the loader has a {type(batches).__name__} as batch_sampler, but the coordinator deals minibatches of "
            "equal size: omit batch_sampler, and give batch_size= and shuffle="
        )
    sampler = batches.sampler
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            "the loader has a DistributedSampler, but the coordinator deals the samples to the ranks: omit it, and "
            "give shuffle=True"
        )
    if type(sampler) not in (RandomSampler, SequentialSampler):  # a subclass has another order
        raise UsageError(
            f"the loader has a {type(sampler).__name__}, but the coordinator deals the samples in order or as "
            "a RandomSampler draws them: omit sampler, and give shuffle="
        )


def rebuild_loader(loader: DataLoader[Any], **sampling: Any) -> DataLoader[Any]:
    """Return a DataLoader that loads as another one does, but other samples.

    Args:
        loader: DataLoader of the user.
        sampling: arguments of `DataLoader` that say which samples, or that replace those of the other one.
    """
    loading = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
    }
    return DataLoader(loader.dataset, **{**loading, **sampling})
