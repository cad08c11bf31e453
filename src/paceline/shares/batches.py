"""Batches of an update: which ones all ranks would read with equal shares, and how they are cut by other shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from paceline.shares.rank_batches import Batch, batches_of_ranks


def cut(batches: Sequence[Batch], shares: Sequence[int], rank: int) -> Batch:
    """Return the samples of a rank.

    A rank keeps the first samples of its own batch. What ranks with smaller shares leave is dealt in the order of
    ranks to those with larger ones.

    Args:
        batches: batch of each rank with equal shares, all of one size.
        shares: samples of each rank; their sum is that of the batches.
        rank: number of the rank.

    Example:
        >>> cut([[0, 1, 2], [10, 11, 12], [20, 21, 22]], (1, 3, 5), rank=2)
        [20, 21, 22, 1, 2]
    """
    size = len(batches[0])
    own = batches[rank][: shares[rank]]
    missing = shares[rank] - len(own)
    if missing:
        left = [each for batch, share in zip(batches, shares, strict=True) for each in batch[share:]]
        begin = sum(max(0, share - size) for share in shares[:rank])
        own = own + left[begin : begin + missing]
    return own


class Dealt(NamedTuple):
    """Batch that a loader was given to load.

    Attributes:
        shares: samples of each rank in this update; None if this batch is not cut.
        size: samples of a rank with equal shares.
    """

    shares: tuple[int, ...] | None
    size: int

    def samples_of(self, rank: int) -> int:
        """Return the samples of a rank."""
        return self.size if self.shares is None else self.shares[rank]


class CutSampler:
    """Batch sampler that cuts each update's batches by the shares that hold when the batch is asked for.

    Ranks ask for batches at the same places of the same script, so the shares of an update are the same on all of them.
    Batches that the processes of a loader hold already keep their shares.

    Args:
        sampler: batch sampler of the script, which yields the batches of this rank.
        ranks: number of ranks.
        rank: number of this rank.
        shares_for: function that returns the shares for a batch size; None to leave a batch as it is.
    """

    def __init__(
        self, sampler: Any, ranks: int, rank: int, shares_for: Callable[[int], tuple[int, ...] | None]
    ) -> None:
        self._sampler = sampler
        self._ranks = ranks
        self._rank = rank
        self._shares_for = shares_for
        self.dealt: deque[Dealt] = deque()

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this rank."""
        self.dealt.clear()
        for batches in zip(*batches_of_ranks(self._sampler, self._ranks), strict=True):
            size = len(batches[0])
            is_even = all(len(batch) == size for batch in batches)
            shares = self._shares_for(size) if is_even else None
            self.dealt.append(Dealt(shares, size))
            yield batches[self._rank] if shares is None else cut(batches, shares, self._rank)
