"""Processes that a framework takes for single ones: the ranks meet in the steps of the optimizer only."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from paceline.user_loop.attached_run import AttachedRun
from paceline.user_loop.data.loop_data import rebuild_loader
from paceline.utils.rank_logger import RankLogger
from paceline.worker.torch_utils import to_device

LOG = RankLogger(__name__)
OF_THE_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank() -> int:
    """Return the rank of this process, 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """Return the number of ranks, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def alone() -> Iterator[None]:
    """Hide the other ranks from a framework that reads the environment meanwhile.

    A collective of a framework is a barrier, and the ranks make unequal numbers of steps.

    >>> os.environ["WORLD_SIZE"] = "4"
    >>> with alone():
    ...     "WORLD_SIZE" in os.environ
    False
    >>> os.environ.pop("WORLD_SIZE")
    '4'
    """
    hidden = {name: os.environ.pop(name) for name in OF_THE_RANK if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def turn_in(folder: str | Path) -> Iterator[None]:
    """Hold the lock of a folder, for what the ranks of a host do one after the other, as downloads."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # some file systems have no locks
            LOG.warning("cannot lock %s (%s): the ranks prepare their data at the same time", folder, error.strerror)
        yield
    finally:
        os.close(descriptor)


class EpochLoader:
    """DataLoader of a framework whose batches are those of the run; each iteration is the next epoch.

    Its length is that of the whole epoch, because a fast rank may get most of the batches. All other attributes are
    those of the framework's loader.

    Args:
        loader: DataLoader of the framework.
        to: device to which batches are moved, None to leave them.

    Attributes:
        loader: the same.
        run: run of this rank, None before it is attached.
    """

    def __init__(self, loader: DataLoader[Any], to: torch.device | None = None) -> None:
        self.loader = loader
        self._to = to
        self.run: AttachedRun | None = None
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, while the object is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def __iter__(self) -> Generator[Any]:
        assert self.run is not None
        self.run.begin_epoch(self._epoch)
        self._epoch += 1
        for batch in self.run.loader:
            yield batch if self._to is None else to_device(batch, self._to)


def with_plain_shuffling(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a DataLoader with torch's shuffling in place of Accelerate's, which differs in its seeds only."""
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler) or type(batches.sampler).__name__ != "SeedableRandomSampler":
        return loader
    theirs = batches.sampler
    assert isinstance(theirs, RandomSampler)
    shuffling = RandomSampler(theirs.data_source, theirs.replacement, len(theirs))
    return rebuild_loader(loader, batch_size=batches.batch_size, sampler=shuffling, drop_last=batches.drop_last)


def end_run(run: AttachedRun) -> None:
    """End the run for all ranks if rank 0 has left its loop, and for this one if another rank has."""
    if not run.over and rank() == 0 and not run.ends_together:
        run.stop()
    run.finish()
