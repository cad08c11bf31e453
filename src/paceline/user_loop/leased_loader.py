"""Leased loader: the batches that the server deals to one rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader, default_collate

from paceline.errors import RunError
from paceline.utils.rank_logger import RankLogger

if TYPE_CHECKING:
    from paceline.user_loop.attached_run import AttachedRun

LOG = RankLogger(__name__)


class LeasedLoader:
    """Batches that the server deals to this rank; each iteration is one epoch.

    Args:
        run: run of this rank.
        loader: DataLoader of the user, whose data set and collate function are used.
        accumulate: batches of each step, >= 1.
    """

    def __init__(self, run: AttachedRun, loader: DataLoader[Any], accumulate: int) -> None:
        self._run = weakref.proxy(run)
        self._loader = loader
        self._accumulate = accumulate
        if loader.num_workers:
            LOG.warning("run.loader loads in this process: num_workers=%d has no effect", loader.num_workers)

    def __len__(self) -> int:
        """Return the number of batches that one rank alone would have in an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch.

        Raises:
            RunError: `optimizer.step()` was not called after the last batches.
        """
        while (task := self._run.next_task()) is not None:
            for indices in np.array_split(task.indices, self._accumulate):
                yield self._batch(indices.tolist())
            if self._run.next_task() is task:
                raise RunError(
                    f"optimizer.step() was not called after {self._accumulate} of run.loader's batches: give attach "
                    "accumulate= if a step takes more batches"
                )

    def _batch(self, indices: list[int]) -> Any:
        data: Any = self._loader.dataset
        samples = data.__getitems__(indices) if hasattr(data, "__getitems__") else [data[i] for i in indices]
        collate: Callable[[Any], Any] = self._loader.collate_fn or default_collate
        return collate(samples)
