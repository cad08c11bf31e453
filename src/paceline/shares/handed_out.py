"""Batches that loaders have handed out, and which of them a forward pass reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.shares.batches import Dealt

DEEPEST = 3  # batches that a script may take ahead of the one that it computes

Loader = DataLoader[Any]


class HandedOut(NamedTuple):
    """Batch that a loader has returned.

    Attributes:
        loader: loader; None for a batch that the script has made itself.
        dealt: shares of the batch; None if it was not dealt by rank, or at the end of the loader.
    """

    loader: Loader | None
    dealt: Dealt | None


class HandedOutBatches:
    """Latest batches of all loaders.

    A script computes the batch that it was given last, unless it takes batches ahead, as Accelerate and many loops for
    devices do. How many it takes ahead shows when batches of unlike sizes follow each other: a forward pass reads
    tensors of the size of its own batch.

    Args:
        rank: number of this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._latest: deque[HandedOut] = deque(maxlen=DEEPEST + 1)
        self._ahead: int | None = None  # batches that the script takes ahead, once it is known
        self._read: HandedOut | None = None

    def add(self, batch: HandedOut) -> None:
        """Add a batch, or the end of a loader as one without shares."""
        self._latest.append(batch)

    def forward_began(self, sizes: Collection[int]) -> None:
        """Note a forward pass with gradients.

        Args:
            sizes: first dimension of each tensor that it reads.

        Raises:
            UsageError: the passes do not agree on how many batches are taken ahead.
        """
        own = [each.dealt.samples_of(self._rank) if each.dealt else None for each in reversed(self._latest)]
        if len({size for size in own if size is not None}) > 1:
            fitting = [ahead for ahead, size in enumerate(own) if size in sizes]
            if self._ahead is None and fitting:
                self._ahead = fitting[0]
            elif fitting and self._ahead not in fitting:
                raise UsageError(
                    f"a forward pass reads a batch of {own[fitting[0]]} samples, and the loader has handed out "
                    f"{own[self._ahead or 0]}: the batches that are computed cannot be told apart; start the script "
                    "with torchrun"
                )
        self._read = self._at(self._ahead or 0)

    def take(self) -> HandedOut:
        """Return the batch of the backward pass that begins: that of the forward pass before it, if one was seen."""
        read, self._read = self._read, None
        return read or self._at(self._ahead or 0)

    def _at(self, ahead: int) -> HandedOut:
        return self._latest[-1 - ahead] if len(self._latest) > ahead else HandedOut(None, None)
