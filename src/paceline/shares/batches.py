"""Batches of an update: how they are cut by shares, or dealt by the costs of their samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from paceline.shares.rank_batches import Batch, batches_of_ranks, checksum_of, epoch_of
from paceline.shares.survival.ledger import BatchLedger, NumberedBatch


class Dealt(NamedTuple):
    """Division of the samples of an update.

    Attributes:
        samples: samples of each rank.
        size: samples of a rank with equal shares; 0 if the script has dealt the batch itself.
        work: cost of each rank's batch; its samples, where costs are not known.
        equal_work: the same with equal shares.
        batch: the samples themselves, where a rank may be lost.
        iteration: iteration over the loader; None for a batch that the script makes itself.
        checksum: checksum of the samples; 0 for a batch that the script makes itself.
    """

    samples: tuple[int, ...]
    size: int
    work: tuple[float, ...]
    equal_work: tuple[float, ...]
    batch: NumberedBatch | None = None
    iteration: object = None
    checksum: int = 0

    def weight(self, rank: int) -> float:
        """Return what the mean over a rank's samples counts in the mean of the ranks."""
        return self.samples[rank] / self.size if self.size else len(self.samples) / sum(map(bool, self.samples))


def divided(shares: Sequence[int], size: int = 0) -> Dealt:
    """Return a division by samples alone.

    Args:
        shares: samples of each rank.
        size: samples of a rank with equal shares; 0 if the script has dealt the batch itself.
    """
    equal = [size] * len(shares) if size else shares
    return Dealt(samples=tuple(shares), size=size, work=tuple(shares), equal_work=tuple(equal))


def numbered(dealt: Dealt, batches: Sequence[Batch], sampler: Any, ledger: BatchLedger) -> Dealt:
    """Return a division with the number of its batches in a ledger.

    Args:
        dealt: division.
        batches: batch of each rank with equal shares.
        sampler: batch sampler of the loader.
        ledger: ledger of the loader.
    """
    return dealt._replace(batch=ledger.deal(batches, epoch_of(sampler)))


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


def cut_for(batches: Sequence[Batch], shares: Sequence[int], equal: Sequence[int], rank: int) -> tuple[Batch, Dealt]:
    """Return the samples of a rank, and how an update is divided, where only some ranks live.

    Args:
        batches: batch of each rank, also of the lost ones.
        shares: samples of each rank, 0 for a lost one; their sum is that of the batches.
        equal: equal shares of the ranks.
        rank: number of the rank, one of those that live.

    Example:
        >>> cut_for([[0, 1], [10, 11], [20, 21]], (4, 0, 2), (3, 0, 3), rank=2)[0]
        [20, 21]
    """
    samples = [each for batch in batches for each in batch]
    begin = sum(shares[:rank])
    size = len(batches[0]) if len(set(map(len, batches))) == 1 else 0
    dealt = Dealt(samples=tuple(shares), size=size, work=tuple(map(float, shares)), equal_work=tuple(map(float, equal)))
    return samples[begin : begin + shares[rank]], dealt


def piece(batches: Sequence[Batch], rank: int, size: int) -> tuple[Batch, Dealt]:
    """Return the first samples of a rank's own batch, where its gradients count nothing.

    Args:
        batches: batch of each rank with equal shares.
        rank: number of the rank.
        size: most samples.
    """
    own = batches[rank][:size]
    dealt = divided([len(own)] * len(batches), len(own))
    return own, dealt._replace(size=len(batches[rank]))


class CutSampler:
    """Batch sampler that deals the batches of each update anew when they are asked for.

    Ranks ask for batches at the same places of the same script, so they all divide an update alike. Batches that the
    processes of a loader hold already stay as they were dealt.

    Args:
        sampler: batch sampler of the script, which yields the batches of this rank.
        ranks: number of ranks.
        deal: function that returns this rank's batch, and how the update is divided, from the batches of all ranks.
    """

    def __init__(self, sampler: Any, ranks: int, deal: Callable[[Sequence[Batch]], tuple[Batch, Dealt]]) -> None:
        self._sampler = sampler
        self._ranks = ranks
        self._deal = deal
        self.dealt: deque[Dealt] = deque()

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this rank."""
        self.dealt.clear()  # of a pass that was not finished
        iteration = object()
        for batches in zip(*batches_of_ranks(self._sampler, self._ranks), strict=True):
            own, dealt = self._deal(batches)
            self.dealt.append(dealt._replace(iteration=iteration, checksum=checksum_of(batches)))
            yield own
