"""Loader of an attached run: the batches of one rank, each with a task of the run."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sized
from contextlib import contextmanager
from typing import Any, Protocol

from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.user_loop.data.ahead_loader import AheadLoader
from paceline.user_loop.data.batch_source import BatchSource, DrawnBatches
from paceline.user_loop.data.dealt_batches import DealtBatches
from paceline.user_loop.data.loader_checks import draws_itself
from paceline.user_loop.data.loop_values import LoopValues
from paceline.user_loop.worker.exchange import LoopTask


class LoaderTasks(Protocol):
    """Tasks that the coordinator gives to this rank."""

    over: bool

    def take(self) -> LoopTask | None:
        """Return the task whose batches the loop takes now, None if it is of a later epoch or the run is over."""

    def begin_iteration(self) -> None:
        """Begin an epoch, of which the tasks follow."""

    def next_task(self) -> LoopTask | None:
        """Return the task of this rank, None if it is of a later epoch or the run is over."""

    def settle_without_step(self, task: LoopTask) -> None:
        """Settle a task whose batches were used without a step."""


class RunLoader:
    """Batches of this rank, which the coordinator deals to it, or which it reads itself; each iteration is one epoch.

    The processes of the DataLoader load the leased minibatches ahead, and live until the end of the run.

    Args:
        tasks: tasks of this rank.
        loader: DataLoader of the user, of which all but the order of the samples is used; None without one.
        accumulate: batches of each step, >= 1.
        ranks: ranks that share the batches, >= 1.
        kept: values of the loop, of which a checkpoint may need those at the start of each task.

    Attributes:
        is_iterating: whether an epoch has begun and not ended.
    """

    def __init__(
        self,
        tasks: LoaderTasks,
        loader: DataLoader[Any] | None,
        accumulate: int,
        ranks: int,
        kept: LoopValues,
    ) -> None:
        self._tasks = tasks
        self._kept = kept
        self._loader = loader
        self._accumulate = accumulate
        self._ranks = ranks
        self._length = _length(loader)
        self._source: BatchSource | None = None
        self.is_iterating = False

    @property
    def name(self) -> str:
        """What the loop iterates over."""
        return "run.steps(1000)" if self._loader is None else "run.loader"

    @property
    def is_exhausted(self) -> bool:
        """Whether the epoch has no further batch for this rank."""
        return self._tasks.next_task() is None

    def __len__(self) -> int:
        """Return the number of batches in an epoch of one of equally fast ranks."""
        if self._loader is None:
            raise TypeError("the loop draws its data without a loader, so run.loader has no length")
        return -(-len(self._loader) // (1 if draws_itself(self._loader) else self._ranks))

    def __iter__(self) -> Generator[Any, None, str]:
        """Yield the batches of an epoch; the `StopIteration` at its end says why there is no further one.

        Raises:
            RunError: `optimizer.step()` was not called after the last batches, although the gradient is finite.
            UsageError: the length of the data set has changed, or there is no loader.
        """
        if _length(self._loader) != self._length:
            raise UsageError(
                f"the data set had {self._length} samples, and has {_length(self._loader)} now, of which the "
                "coordinator does not know: keep its length, or give it as an IterableDataset"
            )
        with self.iterating():
            self._tasks.begin_iteration()
            if self._source is not None:  # else the run is over
                self._source.begin_epoch()
                yield from self._epoch(self._source)
        if self._tasks.over:
            return "the run is over: check run.over before next()"
        return "the epoch has no further batch for this rank: begin the next one"

    @contextmanager
    def iterating(self) -> Iterator[None]:
        """Note that the loop takes batches within this context."""
        self.is_iterating = True
        try:
            yield
        finally:
            self.is_iterating = False

    def _epoch(self, source: BatchSource) -> Iterator[Any]:
        while (task := self._tasks.take()) is not None:
            if not task.step:
                self._kept.start_task()
            batches = source.batches(task)
            if batches is None:
                return
            yield from batches
            if self._tasks.next_task() is task:
                self._tasks.settle_without_step(task)

    def samples(self, task: LoopTask | None) -> int:
        """Return the samples in all batches of a task, >= 1; 0 without a task."""
        return 0 if task is None or self._source is None else self._source.samples(task)

    def start(self, rank: int, dealt: DealtBatches | None) -> None:
        """Start the processes of the DataLoader, before this process has threads and connections.

        Args:
            rank: rank of this process, on which the random numbers of the processes depend.
            dealt: batches of the minibatches that are dealt; None if this rank draws its own.
        """
        if dealt is None or self._loader is None:
            self._source = DrawnBatches(self._loader, self._accumulate)
        else:
            self._source = AheadLoader(self._loader, dealt, rank)

    def close(self) -> None:
        """End the processes of the DataLoader."""
        self._source = None


def _length(loader: DataLoader[Any] | None) -> int | None:
    """Return the number of samples of the data set; None if it has none."""
    if loader is None or draws_itself(loader) or not isinstance(loader.dataset, Sized):
        return None
    return len(loader.dataset)
