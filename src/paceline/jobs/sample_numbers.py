"""Numbers of samples whose data stay with the ranks that compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


class SampleNumbers:
    """Numbers of the samples, in place of the data, which stay with the ranks.

    Args:
        count: number of samples, >= 1.
        digest: digest of the first and the last sample, empty if unknown.
        order: name and first items of an order that the ranks know, empty for one of torch.
    """

    def __init__(self, count: int, digest: str = "", order: str = "") -> None:
        self._count = count
        self.digest = digest
        self.order = order

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    def __getitem__(self, index: int) -> int:
        """Return a number."""
        return index


class DrawnSamples(IterableDataset[Any]):
    """Samples that each rank draws itself, in place of the data."""

    def __iter__(self) -> Iterator[Any]:
        """Raise: the data stay with the ranks."""
        raise NotImplementedError("each rank draws its own samples")
