"""Times of the ranks, gathered without waiting, and the few numbers that are waited for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class RankTimes:
    """Exchange of rows of numbers between the ranks, through a group of its own.

    Args:
        count: number of ranks.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._group = dist.new_group(backend="gloo")
        self._all_gather = getattr(dist.all_gather, "__wrapped__", dist.all_gather)  # not the patched one
        self._pending: Any = None
        self._rows: list[torch.Tensor] = []

    def begin(self, row: list[float]) -> None:
        """Begin to gather a row, of the same length on all ranks."""
        self._rows, self._pending = self._begun(row)

    def end(self) -> list[list[float]] | None:
        """Return the rows that were begun last, in the order of ranks; None if none are under way."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        pending.wait()
        return [row.tolist() for row in self._rows]

    def close(self) -> list[list[float]] | None:
        """Return the rows as `end` does, or None if a rank has been lost.

        A process that ended meanwhile would abort those of the other ranks.
        """
        try:
            return self.end()
        except RuntimeError:
            return None

    def gather(self, row: list[float]) -> list[list[float]]:
        """Return the rows of all ranks, which are waited for."""
        rows, pending = self._begun(row)
        pending.wait()
        return [each.tolist() for each in rows]

    def sum(self, value: float) -> float:
        """Return the sum of a value over the ranks, which are waited for."""
        total = torch.tensor([value], dtype=torch.float64, device="cpu")
        dist.all_reduce(total, group=self._group)
        return float(total)

    def _begun(self, row: list[float]) -> tuple[list[torch.Tensor], Any]:
        mine = torch.tensor(row, dtype=torch.float64, device="cpu")
        rows = [torch.empty_like(mine) for _ in range(self.count)]
        return rows, self._all_gather(rows, mine, group=self._group, async_op=True)
