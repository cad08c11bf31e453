"""Parts of a user's loop, and what the server and the job of a rank need of its DataLoader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from paceline.errors import UsageError
from paceline.jobs.job import Job
from paceline.jobs.sample_numbers import DrawnSamples, SampleNumbers
from paceline.user_loop.data.loader_checks import draws_itself, own_sampler, stacks_samples
from paceline.utils.wording import counted

ATTACHED = "attached"  # name of the job of an attached loop


class LoopDigests(NamedTuple):
    """Digests of the parts of a loop, by which ranks that have other ones are noticed.

    Attributes:
        samples: digest of the first and the last sample, empty if unknown.
        order: name and first items of the order that a sampler of the user gives, empty for an order of torch.
        frozen: digest of the frozen parameters of the model, empty without any.
    """

    samples: str = ""
    order: str = ""
    frozen: str = ""


class UserLoop(NamedTuple):
    """Parts of a user's loop, as they were given to `pl.attach`.

    Attributes:
        model: model of the user.
        optimizer: optimizer of the user.
        loader: DataLoader of the user; None if the loop draws its data without one.
        accumulate: batches of each step, >= 1.
        clip_norm: largest norm of the mean gradient, None for no clipping.
        digests: digests of the loader and the model.
        group_size: ranks that hold a replica of the model together, >= 1; each has batches of its own.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any] | None
    accumulate: int
    clip_norm: float | None
    digests: LoopDigests = LoopDigests()
    group_size: int = 1

    @property
    def device(self) -> torch.device:
        """Device of the model, on which its versions are and its gradients are summed; the CPU for one on several."""
        devices = {each.device for each in [*self.model.parameters(), *self.model.buffers()]}
        return devices.pop() if len(devices) == 1 else torch.device("cpu")


class LoopData(msgspec.Struct, frozen=True, kw_only=True):
    """Data of a loop, equal on all ranks.

    Attributes:
        samples: samples of the training data, >= 1, or the batches that a batch sampler of the user makes of them; 0 if
            each rank draws its own data.
        batch_size: samples, or batches of a batch sampler, in the minibatch of one step, >= 1.
        drop_last: whether an epoch leaves out the samples after the last whole minibatch.
        ahead: minibatches that each rank loads ahead, >= 0.
        shuffles: whether each epoch shuffles the samples.
        drawn: samples that each epoch draws at random, >= 1; None for an epoch of every sample once.
        replacement: whether they are drawn with replacement.
        digests: digests of the loop.
    """

    samples: int
    batch_size: int
    drop_last: bool = False
    ahead: int = 0
    shuffles: bool = False
    drawn: int | None = None
    replacement: bool = False
    digests: LoopDigests = LoopDigests()

    @classmethod
    def of_loop(cls, loop: UserLoop) -> LoopData:
        """Return the data of a loop whose steps take several batches."""
        loader, accumulate = loop.loader, loop.accumulate
        batches_each = accumulate * loop.group_size  # of a minibatch
        if loader is None or draws_itself(loader):
            size = 1 if loader is None else loader.batch_size or 1
            return cls(samples=0, batch_size=size * batches_each)
        ahead = -(-loader.num_workers * (loader.prefetch_factor or 0) // accumulate)
        if (sampler := own_sampler(loader)) is not None and not stacks_samples(loader):
            return cls(samples=len(sampler), batch_size=accumulate, drop_last=True, ahead=ahead, digests=loop.digests)
        batches = loader.batch_sampler
        assert isinstance(batches, BatchSampler)
        batch_size = batches.batch_size * batches_each
        count = len(batches.sampler)  # type: ignore[arg-type]  # checked by `check_loader`
        drop_last = batches.drop_last or count % batch_size < batches_each  # no batch of a step may be empty
        if sampler is not None:
            return cls(samples=count, batch_size=batch_size, drop_last=drop_last, ahead=ahead, digests=loop.digests)
        order = batches.sampler
        assert isinstance(order, RandomSampler | SequentialSampler)
        samples = len(order.data_source)
        replacement = isinstance(order, RandomSampler) and order.replacement
        return cls(
            samples=samples,
            batch_size=batch_size,
            drop_last=drop_last,
            shuffles=isinstance(order, RandomSampler),
            drawn=count if replacement or count != samples else None,
            replacement=replacement,
            ahead=ahead,
            digests=loop.digests,
        )

    def job_settings(self) -> dict[str, Any]:
        """Return the arguments of a `LoopJob` with these data, of which it holds only the numbers of the samples."""
        shared = {
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "ahead": self.ahead,
            "frozen": self.digests.frozen,
        }
        if not self.samples:
            return {"data": DrawnSamples(), "sampling": "replacement", **shared}
        data = SampleNumbers(self.samples, self.digests.samples, self.digests.order)
        return {"data": data, "sampler": self._sampler(data), "sampling": "epoch", **shared}

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
        frozen: digest of the frozen parameters, which no version has; empty without any.
    """

    drop_last: bool
    ahead: int
    frozen: str

    @property
    def minibatches_ahead(self) -> int:
        """Minibatches that the coordinator forecasts for each rank."""
        return self.ahead

    def minibatches_per_epoch(self, shards: int = 1) -> int | None:
        """Return the number of minibatches in an epoch, of which the last one may be smaller; None without epochs."""
        if self.is_iterable:
            return None
        samples = len(self.data if self.sampler is None else self.sampler)  # type: ignore[arg-type]  # sized here
        whole, rest = divmod(samples, self.batch_size)
        per_epoch = whole + (rest > 0 and not self.drop_last)
        if not per_epoch:
            raise UsageError(
                f"an epoch has {counted(samples, 'sample')}, too few for a step of {self.batch_size}: give the "
                "loader a smaller batch_size"
            )
        return per_epoch


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
