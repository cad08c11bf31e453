"""Ahead loader: a DataLoader of the minibatches that are dealt to a rank, which it loads before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from paceline.core.events import Minibatch
from paceline.user_loop.data.dealt_batches import DealtBatches
from paceline.user_loop.data.loader_checks import stacks_samples
from paceline.user_loop.data.loop_data import rebuild_loader
from paceline.user_loop.worker.exchange import LoopTask


class _Part(NamedTuple):
    """One of the batches of a minibatch."""

    minibatch: Minibatch
    number: int


class LeaseSampler(Iterator[Any]):
    """Sampler of leases, in place of that of the user. Its end, where no further lease is known, is not final.

    Attributes:
        requested: batches that the DataLoader has requested and not returned, oldest first.
    """

    def __init__(self) -> None:
        self.requested: deque[_Part] = deque()
        self._next: deque[tuple[_Part, Any]] = deque()

    def __next__(self) -> Any:
        if not self._next:
            raise StopIteration
        part, item = self._next.popleft()
        self.requested.append(part)
        return item

    def request(self, parts: Iterable[tuple[_Part, Any]]) -> None:
        """Set the batches to request next, with their samples."""
        self._next = deque(parts)


class AheadLoader:
    """DataLoader of the leases of one rank. A batch whose lease has gone to another rank is discarded.

    Args:
        loader: DataLoader of the user.
        dealt: batches of each minibatch.
        rank: rank of this process.
    """

    def __init__(self, loader: DataLoader[Any], dealt: DealtBatches, rank: int) -> None:
        self._dealt = dealt
        self._known: dict[Minibatch, list[Any]] = {}
        self._sampler = LeaseSampler()
        has_batches = stacks_samples(loader) or loader.batch_sampler is not None
        sampling = {"batch_sampler": self._sampler} if has_batches else {"batch_size": None, "sampler": self._sampler}
        self._loader = rebuild_loader(
            loader,
            **sampling,
            generator=loader.generator or torch.Generator().manual_seed(torch.initial_seed() + rank),
            persistent_workers=loader.num_workers > 0,
        )
        self._batches = iter(self._loader)

    def begin_epoch(self) -> None:
        """Do nothing: the epoch of each batch is known."""

    def batches(self, task: LoopTask) -> Iterator[Any]:
        """Yield the batches of a task, and request those of the minibatches that follow."""
        minibatches = (_minibatch(task), *task.upcoming)
        self._known = {each: self._of(each) for each in minibatches}
        parts = [(_Part(each, number), item) for each in minibatches for number, item in enumerate(self._known[each])]
        self._sampler.request(each for each in parts if each[0] not in self._sampler.requested)
        for number in range(len(self._known[minibatches[0]])):
            yield self._batch(parts[number:])

    def samples(self, task: LoopTask) -> int:
        """Return the samples in all batches of a task."""
        return sum(len(item) if isinstance(item, Sized) else 1 for item in self._of(_minibatch(task)))

    def _of(self, minibatch: Minibatch) -> list[Any]:
        return self._known.get(minibatch) or self._dealt.of(minibatch)

    def _batch(self, parts: list[tuple[_Part, Any]]) -> Any:
        """Return the first one of these batches."""
        requested = self._sampler.requested
        part = parts[0][0]
        if part not in requested:
            requested.clear()
            self._sampler.request(parts)
            if self._loader.num_workers:
                self._batches = iter(self._loader)  # discards what the processes have loaded
        try:
            while True:
                batch = next(self._batches)
                if requested.popleft() == part:
                    return batch
        except BaseException:
            requested.clear()  # the DataLoader may have returned a batch or not
            raise


def _minibatch(task: LoopTask) -> Minibatch:
    assert task.minibatch is not None
    return task.minibatch
