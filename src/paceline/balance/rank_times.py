"""Times of the ranks, which no rank waits for until the next one begins."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class RankTimes:
    """Gathering of one row of numbers of each rank, through a group of its own.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._group = dist.new_group(backend="gloo")
        self._ranks = ranks
        self._pending: Any = None
        self._rows: list[torch.Tensor] = []

    def begin(self, row: list[float]) -> None:
        """Begin to gather a row, of the same length on all ranks."""
        mine = torch.tensor(row, dtype=torch.float64)
        self._rows = [torch.empty_like(mine) for _ in range(self._ranks)]
        self._pending = dist.all_gather(self._rows, mine, group=self._group, async_op=True)

    def end(self) -> list[list[float]] | None:
        """Return the rows of all ranks in order, as begun last; None before the first."""
        if self._pending is None:
            return None
        self._pending.wait()
        self._pending = None
        return [row.tolist() for row in self._rows]

    def sum(self, value: float) -> float:
        """Return the sum of a value over the ranks, which are waited for."""
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return float(total)
