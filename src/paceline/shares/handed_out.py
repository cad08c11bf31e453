"""Batches that loaders have handed out, and which of them a pass computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.shares.batches import Dealt
from paceline.shares.texts import WITHOUT

MOST_WAITING = 256  # batches that a script has taken and not computed

Loader = DataLoader[Any]


class HandedOut(NamedTuple):
    """Batch that a loader has returned.

    Attributes:
        loader: loader; None for a batch that the script has made itself.
        dealt: shares of the batch; None if it was not dealt by rank.
    """

    loader: Loader | None
    dealt: Dealt | None


class HandedOutBatches:
    """Latest batches of all loaders, in the order in which a script computes them.

    A script may take batches ahead: one, as Accelerate does, or those of a whole update, as transformers does. A
    forward pass reads tensors whose first dimension is that of its batch, by which batches of unlike sizes are told
    apart. Where it does not, the latest batch counts.

    Args:
        rank: number of this rank.
        is_training: function that tells whether a loader is known to have training batches.
    """

    def __init__(self, rank: int, is_training: Callable[[Loader | None], bool]) -> None:
        self._rank = rank
        self._is_training = is_training
        self._waiting: deque[HandedOut] = deque(maxlen=MOST_WAITING)
        self._current = HandedOut(None, None)
        self._is_seen = False  # whether a forward pass was seen since the last backward pass
        self._is_told_apart = False

    @property
    def latest(self) -> HandedOut:
        """Batch that was handed out last."""
        return self._waiting[-1] if self._waiting else self._current

    def add(self, batch: HandedOut) -> None:
        """Add a batch."""
        self._waiting.append(batch)

    def forward_began(self, shapes: Collection[Sequence[int]]) -> None:
        """Note a forward pass with gradients.

        Args:
            shapes: shape of each tensor that it reads, of one dimension at least.

        Raises:
            UsageError: it cannot be told which batch it computes, or it computes none.
        """
        self._is_seen = True
        sizes = {shape[0] for shape in shapes}
        known = [each for each in self._waiting if self._is_training(each.loader)]
        waiting = known or list(self._waiting)
        in_order = known or waiting[::-1]  # at first, batches for evaluation may come before
        fitting = next((each for each in in_order if self._samples(each) in sizes), None)
        if fitting is not None:
            self._is_told_apart |= self._samples(fitting) != self._samples(waiting[-1])
            while self._waiting.popleft() is not fitting:
                pass
            self._current = fitting
        elif waiting and self._samples(self._current) not in sizes:
            self._take_latest(waiting)
        self._check_is_read(shapes, sizes)

    def backward_began(self) -> HandedOut:
        """Return the batch of a backward pass: that of the latest forward pass, if one was seen since it was taken.

        Raises:
            UsageError: it cannot be told which batch it computes.
        """
        if not self._is_seen and self._waiting:
            self._take_latest(list(self._waiting))
        self._is_seen = False
        return self._current

    def _check_is_read(self, shapes: Collection[Sequence[int]], sizes: Collection[int]) -> None:
        """Check that a pass does not compute as many samples as with equal shares, which are others than its own."""
        samples, dealt = self._samples(self._current), self._current.dealt
        if dealt is not None and samples != dealt.size in sizes and not any(samples in shape for shape in shapes):
            raise UsageError(
                f"the model computes {dealt.size} samples, but this rank's batch has {samples}: let the script compute "
                f"what the loader hands out, len(batch) samples of it, or ask paceline.share({dealt.size}) for the "
                f"size of a batch of its own; {WITHOUT}"
            )

    def _take_latest(self, waiting: list[HandedOut]) -> None:
        if self._is_told_apart or len({self._samples(each) for each in waiting}) > 1:
            sizes = ", ".join(str(self._samples(each)) for each in waiting)
            raise UsageError(
                f"the script has taken batches of {sizes} samples, and the model does not show which one it computes: "
                "take one batch at a time, or start the script with torchrun"
            )
        self._current = waiting[-1]
        self._waiting.clear()

    def _samples(self, batch: HandedOut) -> int | None:
        return batch.dealt.samples[self._rank] if batch.dealt is not None else None
