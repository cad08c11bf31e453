"""Limits of this rank's share: the memory of its device, and whether its model is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import inf, isnan

import torch

from paceline.policies.share_limits import ShareLimits
from paceline.policies.shares import USED_MEMORY, Pieces

Memory = Callable[[], tuple[int, int]]  # that returns the peak, and what the rank may use, in bytes


def memory_of(device: torch.device) -> Memory | None:
    """Return how the memory of a device is read; None for one whose peak is not known.

    The script's own peak is not reset, so it is that of the largest batch so far. Memory of other processes is not the
    rank's.
    """
    if device.type != "cuda":
        return None

    def read() -> tuple[int, int]:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return torch.cuda.max_memory_allocated(device), free_bytes + torch.cuda.memory_reserved(device)

    return read


class RankLimits:
    """Limits of the ranks' shares, as each rank measures its own and all get to know them with the times.

    Args:
        sizes: sizes that a share may have.
        memory: how the memory is read; None without a limit.
    """

    def __init__(self, sizes: Pieces, memory: Memory | None) -> None:
        self._sizes = sizes
        self._memory = memory
        self._most = sizes.most if memory is None else sizes.batch_size
        self._ceiling = sizes.most  # below what has run out of memory
        self._reads = 0  # updates whose peak is to be read

    def fall(self, samples: int, equal: float) -> bool:
        """Note that a batch has run out of memory; return whether a smaller share than that is to be expected.

        Args:
            samples: samples of the batch.
            equal: those with equal shares, of which a rank has no fewer for want of memory.
        """
        if samples <= equal:
            return False
        self._ceiling = min(self._ceiling, samples - self._sizes.size)
        return True

    def update_ended(self, largest: int, *, is_first: bool) -> list[float]:
        """Return this rank's limits after an update, for the other ranks.

        Args:
            largest: largest batch so far, in samples.
            is_first: whether a batch of the update had a new size: the peak is read then, and once more, since the
                optimizer may have made its state after the first.
        """
        self._reads = 2 if is_first else max(0, self._reads - 1)
        if self._memory is not None and self._reads:
            peak_bytes, memory_bytes = self._memory()
            self._most = self._sizes.fitting(largest, max(1, peak_bytes), memory_bytes)
        return [float(min(self._most, self._ceiling)), float(is_compiling())]

    def of_ranks(self, rows: Sequence[Sequence[float]]) -> ShareLimits:
        """Return the limits of all ranks from theirs; a lost rank has none, and gets no samples."""
        most = (self._sizes.most if isnan(row[0]) else int(row[0]) for row in rows)
        return ShareLimits(tuple(most), any(row[1] == 1 for row in rows))


class WorkLimit:
    """Limit of this rank's work, where samples are dealt by cost: the work of equal shares is taken to fit.

    As with samples, memory grows at most in proportion to the work, and the limit rises by a piece at a time.

    Args:
        pieces: m, pieces of a batch.
        memory: how the memory is read; None without a limit.
    """

    def __init__(self, pieces: int, memory: Memory | None) -> None:
        self._piece = 1 / pieces
        self._memory = memory
        self._most = inf if memory is None else 0.0
        self._ceiling = inf  # below what has run out of memory
        self._largest = 0.0
        self._reads = 0

    def fall(self, work: float, equal_work: float) -> bool:
        """Note that a batch has run out of memory; return whether less work than that is to be expected."""
        if work <= equal_work:
            return False
        self._ceiling = min(self._ceiling, work / (1 + self._piece))
        return True

    def update_ended(self, work: float) -> float:
        """Return the limit after an update of so much work, for the other ranks."""
        self._reads = 2 if work > self._largest else max(0, self._reads - 1)
        self._largest = max(self._largest, work)
        if self._memory is not None and self._reads:
            peak_bytes, memory_bytes = self._memory()
            fitting = USED_MEMORY * memory_bytes / max(1, peak_bytes)
            self._most = self._largest * min(fitting, 1 + self._piece)
        return min(self._most, self._ceiling)


def is_compiling() -> bool:
    """Return whether torch.compile has compiled a function of this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"])
