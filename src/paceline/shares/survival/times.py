"""Times of the ranks that live."""

from __future__ import annotations

from math import nan

import torch

from paceline.shares.rank_times import RankTimes
from paceline.shares.survival.group import SurvivingGroup
from paceline.shares.survival.living_group import Operation


class SurvivingTimes(RankTimes):
    """Exchange of rows of numbers between the living ranks; that of a lost one is nan.

    Args:
        count: number of ranks.
        group: group of all ranks.
    """

    def __init__(self, count: int, group: SurvivingGroup) -> None:
        self.count = count
        self._group = group
        self._pending: Operation | None = None
        self._members: tuple[int, ...] = ()  # of the exchange under way

    def begin(self, row: list[float]) -> None:
        """Begin to gather a row."""
        self._members = self._group.living
        self._pending = self._group.exchange(torch.tensor(row, dtype=torch.float64, device="cpu"))

    def end(self) -> list[list[float]] | None:
        """Return the rows that were begun last, in the order of ranks; None if they are not there."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        pending.future.wait()
        if not pending.is_whole:
            return None
        rows = dict(zip(self._members, (row.tolist() for row in pending.tensors), strict=True))
        lost = [nan] * len(pending.tensors[0])
        return [rows.get(rank, lost) for rank in range(self.count)]

    def gather(self, row: list[float]) -> list[list[float]]:
        """Return the rows of all ranks, which are waited for; a lost one has that of this rank."""
        rows = torch.zeros(self.count, len(row), dtype=torch.float64, device="cpu")
        rows[self._group.rank()] = torch.tensor(row)
        self._group.allreduce([rows])
        found = rows.tolist()
        return [row if rank in self._group.missing else found[rank] for rank in range(self.count)]
