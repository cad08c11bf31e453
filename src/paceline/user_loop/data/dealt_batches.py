"""Dealt batches: the samples of a numbered minibatch, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from paceline.checkpoint.fingerprint import digest_of
from paceline.core.events import Minibatch
from paceline.errors import UsageError
from paceline.jobs.job import Job
from paceline.user_loop.data.loader_checks import own_sampler, stacks_samples
from paceline.user_loop.data.loop_data import UserLoop
from paceline.utils.rng import derived_seed
from paceline.worker.data_loader import SAMPLERS_OF_TORCH, MinibatchLoader, drawn_apart
from paceline.worker.seeding import seeded

DIGESTED = 1000  # items of an order
KEPT = 3  # epochs whose minibatches may be dealt at once


class DealtBatches:
    """Batches of the minibatches that the coordinator deals, as their samples.

    Args:
        job: described job of the loop.
        seed: seed of the run, >= 0.
        loader: DataLoader of the user.
        accumulate: batches of each minibatch, >= 1.
        share: number of this rank among those that share each minibatch, and their number.
    """

    def __init__(
        self, job: Job, seed: int, loader: DataLoader[Any], accumulate: int, share: tuple[int, int] = (0, 1)
    ) -> None:
        self._accumulate = accumulate
        self._share = share
        self._size = job.batch_size
        self._numbers = MinibatchLoader(job, seed, 1)
        sampler = own_sampler(loader)
        self._stacks = stacks_samples(loader)
        self._order = None if sampler is None else OwnOrder(sampler, seed)

    def of(self, minibatch: Minibatch) -> list[Any]:
        """Return the batches of a minibatch, each as what the sampler of its DataLoader gives for it."""
        if self._order is None:
            samples = self._own(self._numbers.indices(0, 0, minibatch))
            return [batch.tolist() for batch in np.array_split(samples, self._accumulate)]
        items: list[Any] = []
        for epoch, start, stop in _ranges(minibatch, self._size):
            items += self._order.epoch(epoch)[start:stop]
        if not self._stacks:
            return items
        cuts = np.array_split(self._own(np.arange(len(items))), self._accumulate)
        return [[items[place] for place in batch] for batch in cuts]

    def _own(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the part of this rank of the samples of a minibatch."""
        number, count = self._share
        return np.array_split(samples, count)[number]


def dealt_to(loop: UserLoop, job: Job, seed: int, share: tuple[int, int] = (0, 1)) -> DealtBatches | None:
    """Return the batches that are dealt to the ranks of a loop; None if each rank draws its own.

    Args:
        loop: parts of the loop.
        job: described job of the loop.
        seed: seed of the run, >= 0.
        share: number of this rank among those that share each minibatch, and their number.
    """
    if loop.loader is None or job.is_iterable:
        return None
    return DealtBatches(job, seed, loop.loader, loop.accumulate, share)


class OwnOrder:
    """Order in which a sampler of the user gives the items of each epoch, drawn by the same numbers on all ranks.

    A sampler without `set_epoch` may keep a state, so its epochs are read one after the other, from the first one.

    Args:
        sampler: sampler, or batch sampler.
        seed: seed of the run, >= 0.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._next = 0
        self._epochs: dict[int, Sequence[Any]] = {}

    def epoch(self, number: int) -> Sequence[Any]:
        """Return the items of an epoch.

        Raises:
            UsageError: an epoch has another number of items than the sampler has said, or is too old.
        """
        if number not in self._epochs:
            for each in range(number if hasattr(self._sampler, "set_epoch") else self._next, number + 1):
                self._draw(each)
        if number not in self._epochs:
            raise UsageError(
                f"a minibatch of epoch {number} is dealt again, whose order the {type(self._sampler).__name__} of the "
                "loader cannot give any more: give it a method set_epoch"
            )
        return self._epochs[number]

    def _draw(self, number: int) -> None:
        items = _items(self._sampler, self._seed, number)
        if len(items) != len(self._sampler):
            raise UsageError(
                f"the {type(self._sampler).__name__} of the loader gives {len(items)} items in epoch {number}, and has "
                f"a length of {len(self._sampler)}: let __len__ return their number, the same in each epoch"
            )
        self._next = max(self._next, number + 1)
        self._epochs[number] = items
        for earlier in list(self._epochs)[:-KEPT]:
            del self._epochs[earlier]


def order_digest(loader: DataLoader[Any]) -> str:
    """Return the name and a digest of the first items of the order that a sampler of the user gives; else empty."""
    sampler = own_sampler(loader)
    return "" if sampler is None else f"{type(sampler).__name__} {digest_of(_items(sampler, 0, 0, DIGESTED))}"


def _items(sampler: Any, seed: int, epoch: int, most: int | None = None) -> list[Any]:
    """Return the items of an epoch, at most a number of them, drawn with random numbers of this seed and epoch."""
    seed = derived_seed(seed, "sampler", epoch)
    if type(sampler) in SAMPLERS_OF_TORCH:
        return list(islice(drawn_apart(sampler, seed), most))
    parts: list[Any] = [sampler, getattr(sampler, "sampler", None)]
    for each in parts:
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
        if isinstance(own := getattr(each, "generator", None), torch.Generator):
            own.manual_seed(seed)
    with seeded(seed):
        return list(islice(sampler, most))


def _ranges(minibatch: Minibatch, size: int) -> list[tuple[int, int, int]]:
    """Return the epoch, the first place and the place after the last one of each range of a minibatch."""
    if not minibatch.slices:
        assert minibatch.epoch is not None
        assert minibatch.number is not None
        return [(minibatch.epoch, minibatch.number * size, (minibatch.number + 1) * size)]
    ranges = []
    for part in minibatch.slices:
        assert part.epoch is not None
        assert part.number is not None
        first = part.number * size
        ranges.append((part.epoch, first + part.begin, first + part.end))
    return ranges
