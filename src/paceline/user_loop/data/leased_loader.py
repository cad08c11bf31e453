"""Leased loader: the batches that the coordinator deals to one rank, loaded by the user's DataLoader."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from paceline.core.events import Minibatch
from paceline.user_loop.data.frozen_parameters import FrozenParameters
from paceline.user_loop.data.loop_data import rebuild_loader
from paceline.user_loop.worker.exchange import LoopTask


class LoaderTasks(Protocol):
    """Tasks that the coordinator gives to this rank."""

    over: bool

    def begin_iteration(self) -> None:
        """Begin an epoch, of which the tasks follow."""

    def next_task(self) -> LoopTask | None:
        """Return the task of this rank, None if it is of a later epoch or the run is over."""

    def settle_without_step(self, task: LoopTask) -> None:
        """Settle a task whose batches were used without a step."""


class LeasedLoader:
    """Batches that the coordinator deals to this rank; each iteration is one epoch.

    The processes of the DataLoader load the leased minibatches ahead, and live until the end of the run.

    Args:
        tasks: tasks of this rank.
        loader: DataLoader of the user, of which all but the order of the samples is used.
        accumulate: batches of each step, >= 1.
        ranks: ranks that share the batches, >= 1.
        frozen: frozen parameters, of which a checkpoint may need the values at the start of each task.

    Attributes:
        begun: newest task of which a batch was returned.
        is_iterating: whether an epoch has begun and not ended.
    """

    def __init__(
        self, tasks: LoaderTasks, loader: DataLoader[Any], accumulate: int, ranks: int, frozen: FrozenParameters
    ) -> None:
        self._tasks = tasks
        self._frozen = frozen
        self._loader = loader
        self._accumulate = accumulate
        self._ranks = ranks
        self._ahead: AheadLoader | None = None
        self.begun: LoopTask | None = None
        self.is_iterating = False

    @property
    def is_exhausted(self) -> bool:
        """Whether the epoch has no further batch for this rank."""
        return self._tasks.next_task() is None

    def __len__(self) -> int:
        """Return the number of batches in an epoch of one of equally fast ranks."""
        return -(-len(self._loader) // self._ranks)

    def __iter__(self) -> Generator[Any, None, str]:
        """Yield the batches of an epoch; the `StopIteration` at its end says why there is no further one.

        Raises:
            RunError: `optimizer.step()` was not called after the last batches, although the gradient is finite.
        """
        self.is_iterating = True
        try:
            self._tasks.begin_iteration()
            yield from self._epoch()
        finally:
            self.is_iterating = False
        if self._tasks.over:
            return "the run is over: check run.over before next()"
        return "the epoch has no further batch for this rank: begin the next one"

    def _epoch(self) -> Iterator[Any]:
        while (task := self._tasks.next_task()) is not None:
            assert self._ahead is not None
            self.begun = task
            if not task.step:
                self._frozen.start_task()
            yield from self._ahead.batches(task)
            if self._tasks.next_task() is task:
                self._tasks.settle_without_step(task)

    def start(self, rank: int) -> None:
        """Start the processes of the DataLoader, before this process has threads and connections.

        Args:
            rank: rank of this process, on which the random numbers of the processes depend.
        """
        self._ahead = AheadLoader(self._loader, self._accumulate, rank)

    def close(self) -> None:
        """End the processes of the DataLoader."""
        self._ahead = None


class _Part(NamedTuple):
    """One of the batches of a minibatch."""

    minibatch: Minibatch
    number: int


class LeaseSampler(Iterator[list[int]]):
    """Batch sampler of leases. Its end, where no further lease is known, is not final.

    Attributes:
        requested: batches that the DataLoader has requested and not returned, oldest first.
    """

    def __init__(self) -> None:
        self.requested: deque[_Part] = deque()
        self._next: deque[tuple[_Part, list[int]]] = deque()

    def __next__(self) -> list[int]:
        if not self._next:
            raise StopIteration
        part, indices = self._next.popleft()
        self.requested.append(part)
        return indices

    def request(self, parts: Iterable[tuple[_Part, list[int]]]) -> None:
        """Set the batches to request next, with their samples."""
        self._next = deque(parts)


class AheadLoader:
    """DataLoader of the leases of one rank. A batch whose lease has gone to another rank is discarded.

    Args:
        loader: DataLoader of the user.
        accumulate: batches of each minibatch, >= 1.
        rank: rank of this process.
    """

    def __init__(self, loader: DataLoader[Any], accumulate: int, rank: int) -> None:
        self._accumulate = accumulate
        self._sampler = LeaseSampler()
        self._loader = rebuild_loader(
            loader,
            batch_sampler=self._sampler,
            generator=loader.generator or torch.Generator().manual_seed(torch.initial_seed() + rank),
            persistent_workers=loader.num_workers > 0,
        )
        self._batches = iter(self._loader)

    def batches(self, task: LoopTask) -> Iterator[Any]:
        """Yield the batches of a task, and request those of the minibatches that follow."""
        parts = [
            (_Part(lease.minibatch, number), indices.tolist())
            for lease in (task.lease, *task.upcoming)
            for number, indices in enumerate(np.array_split(lease.indices, self._accumulate))
        ]
        self._sampler.request(each for each in parts if each[0] not in self._sampler.requested)
        for number in range(self._accumulate):
            yield self._batch(parts[number:])

    def _batch(self, parts: list[tuple[_Part, list[int]]]) -> Any:
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
