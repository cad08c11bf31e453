"""Ledger of the batches of a script: which were used in a step, and which are owed because a rank was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.shares.rank_batches import checksum_of
from paceline.shares.survival.agreement import Range

Whole = Sequence[list[Any]]  # indices of the samples of an update, by rank


class NumberedBatch(NamedTuple):
    """Batch of all ranks.

    Attributes:
        number: number in the order in which batches are dealt, from 0.
        whole: its samples.
        epoch: epoch of its sampler; None if it has none.
    """

    number: int
    whole: Whole
    epoch: int | None = None


class BatchLedger:
    """Account of the batches of one loader, the same on all ranks at the same place of the script.

    Attributes:
        undone: number of the first batch that was used in no step.
        handed_out: number of the first batch that was not handed out.
        offset: number that the first batch of this rank has on ranks that have begun before.
        in_vain: ranges of batches that are computed without a step.
        dropped: ranges of batches that were dealt and are not handed out.
    """

    def __init__(self) -> None:
        self.undone = self.handed_out = self.offset = self._dealt = 0
        self._owed: dict[int, Whole] = {}
        self._computed: dict[int, Whole] = {}  # since the last step
        self._latest: Whole = []
        self.in_vain: tuple[Range, ...] = ()
        self.dropped: tuple[Range, ...] = ()

    def deal(self, whole: Whole, epoch: int | None = None) -> NumberedBatch:
        """Give a number to a batch that is dealt."""
        self._dealt += 1
        return NumberedBatch(self._dealt - 1, whole, epoch)

    @property
    def dealt(self) -> int:
        """Number of the first batch that was not dealt."""
        return self._dealt + self.offset

    def number(self, batch: NumberedBatch) -> int:
        """Return the number of a batch on the ranks that have begun before."""
        return batch.number + self.offset

    def shift(self, offset: int) -> None:
        """Count batches with another offset, also those that were handed out before."""
        self.handed_out += offset - self.offset
        self.offset = offset

    def take_owed(self) -> Whole | None:
        """Return the first batch that is to be handed out again; None without any."""
        return self._owed.pop(min(self._owed)) if self._owed else None

    def hand_out(self, batch: NumberedBatch) -> bool:
        """Return whether a batch is to be handed out; if not, it is owed."""
        if _is_in(self.number(batch), self.dropped):
            self._owed[self.number(batch)] = batch.whole
            return False
        self.handed_out = self.number(batch) + 1
        return True

    def compute(self, batch: NumberedBatch) -> bool:
        """Note a batch of which gradients are computed, and return whether it was used in no step yet."""
        self._computed[self.number(batch)] = self._latest = batch.whole
        return self.number(batch) >= self.undone

    @property
    def is_in_vain(self) -> bool:
        """Whether a batch computed since the last step is computed again later, so that there is no step."""
        return any(_is_in(number, self.in_vain) for number in self._computed)

    def end_update(self, *, is_used: bool) -> None:
        """Note that the batches computed since the last step are used in a step; if not, they are owed."""
        if is_used:
            self.undone = max([self.undone, *(number + 1 for number in self._computed)])
        else:
            self._owed |= self._computed
        self._computed = {}

    @property
    def checksum(self) -> int:
        """Checksum of the samples of which gradients were computed last."""
        return checksum_of(self._latest)

    def give_up(self, in_vain: Range, dropped: tuple[Range, ...]) -> None:
        """Give up batches: some are computed in vain, others are not handed out."""
        self.in_vain += (in_vain,)
        self.dropped = dropped


def _is_in(number: int, ranges: Sequence[Range]) -> bool:
    return any(begin <= number < end for begin, end in ranges)
