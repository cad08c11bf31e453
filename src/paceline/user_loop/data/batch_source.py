"""Source of the batches of a rank: those that are dealt to it, or those that it draws itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.user_loop.worker.exchange import LoopTask
from paceline.worker.data_loader import batch_len


class BatchSource(Protocol):
    """Source of the batches of the tasks of one rank."""

    def begin_epoch(self) -> None:
        """Begin an iteration over the loader of the run."""

    def batches(self, task: LoopTask) -> Iterator[Any] | None:
        """Return the batches of a task; None at the end of the data of this rank."""

    def samples(self, task: LoopTask) -> int:
        """Return the samples in all batches of a task, >= 1."""


class DrawnBatches:
    """Batches that a rank draws itself: its DataLoader reads them in sequence, or the loop has no loader.

    A gradient that is dropped is a dropped batch. The batches of a step that are not whole at the end of the data are
    left out.

    Args:
        loader: DataLoader of the user; None if the loop draws its data without one.
        accumulate: batches of each step, >= 1.
    """

    def __init__(self, loader: DataLoader[Any] | None, accumulate: int) -> None:
        self._loader = loader
        self._accumulate = accumulate
        # Its processes start before this one has connections, but not before a saved place is restored.
        self._unused = None if loader is None or hasattr(loader, "load_state_dict") else iter(loader)
        self._iterator: Iterator[Any] = iter(())
        self._samples = 1  # without a loader each gradient counts alike

    def begin_epoch(self) -> None:
        """Begin to read the data from their beginning."""
        if self._loader is None:
            raise UsageError(
                "attach was given no loader, so the loop draws its data itself: iterate over run.steps(1000) in place "
                "of run.loader"
            )
        self._iterator = iter(self._loader) if self._unused is None else self._unused
        self._unused = None

    def batches(self, task: LoopTask) -> Iterator[Any] | None:
        """Return the next batches of this rank; None at the end of its data."""
        batches = list(islice(self._iterator, self._accumulate))
        if len(batches) < self._accumulate:
            return None
        self._samples = sum(map(batch_len, batches))
        return iter(batches)

    def samples(self, task: LoopTask) -> int:
        """Return the samples in the latest batches."""
        return self._samples
