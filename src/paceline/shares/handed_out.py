"""Batches that loaders have handed out, and which of them a pass computes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.shares.batches import Dealt
from paceline.shares.texts import (
    WITHOUT,
    refusal_of_parts,
    refusal_of_repetition,
    refusal_of_thread,
    refusal_of_weights,
)

MOST_WAITING = 256  # batches that a script has taken and not computed

Loader = DataLoader[Any]


class HandedOut(NamedTuple):
    """Batch that a loader has returned.

    Attributes:
        loader: loader; None for a batch that the script has made itself.
        dealt: shares of the batch; None if it was not dealt by rank.
        is_by_thread: whether a thread has taken it that does not compute.
    """

    loader: Loader | None
    dealt: Dealt | None
    is_by_thread: bool = False

    @property
    def iteration(self) -> object:
        """Iteration over the loader; None if it was not dealt by rank."""
        return self.dealt.iteration if self.dealt is not None else None

    def is_of(self, other: HandedOut) -> bool:
        """Return whether both are of one iteration over one loader."""
        return self.loader is other.loader and self.iteration is other.iteration


class HandedOutBatches:
    """Latest batches of all loaders, in the order in which a script computes them.

    A script may take batches ahead: one, as Accelerate does, or those of a whole update, as transformers does. A
    forward pass reads tensors whose first dimension is that of its batch, by which batches of unlike sizes are told
    apart. Where it does not, the latest batch counts.

    A script may also read a loader without training, as for the accuracy on training samples. Then it takes more
    batches than it ever takes ahead, and goes on with another iteration.

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
        self._seen: list[HandedOut] = []  # batches of forward passes since then
        self._parts: list[int] = []  # samples of forward passes that may each compute a part of the current batch
        self._is_told_apart = False
        self._most_ahead = 0  # batches of a loader that were taken ahead of the one that is computed
        self._passes = 0  # backward passes of the current batch
        self._most_passes = 0  # of an earlier one
        self._ended: WeakSet[Loader] = WeakSet()  # loaders, since their latest batch

    @property
    def latest(self) -> HandedOut:
        """Batch that was handed out last."""
        return self._waiting[-1] if self._waiting else self._current

    @property
    def are_none(self) -> bool:
        """Whether none is known that a pass could compute."""
        return self.latest == HandedOut(None, None)

    def add(self, batch: HandedOut) -> None:
        """Add a batch."""
        self._forget_unread(batch)
        self._waiting.append(batch)
        if batch.loader is not None:
            self._ended.discard(batch.loader)

    def loader_ended(self, loader: Loader) -> None:
        """Note that a loader has no more batches until the script iterates over it anew."""
        self._ended.add(loader)

    @property
    def is_repeated(self) -> bool:
        """Whether the latest backward pass computes a batch of an iteration that has ended, which it does not show.

        Then the current batch, the last one of that iteration, seems to have more passes than any before.
        """
        return 0 < self._most_passes < self._passes and self._current.loader in self._ended

    @property
    def ahead(self) -> int:
        """Batches of the current iteration that were taken, and that no pass computes yet."""
        if self._current.iteration is None:
            return 0
        return sum(each.is_of(self._current) for each in self._waiting)

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
        candidates = [each for each in waiting if self._samples(each) in sizes]
        if not known:  # batches of a loader for evaluation may come before
            candidates = [each for each in candidates if each.loader is candidates[-1].loader]
        if candidates:
            fitting = candidates[0]
            self._is_told_apart |= self._samples(fitting) != self._samples(waiting[-1])
            while self._waiting.popleft() is not fitting:
                pass
            self._go_on_to(fitting)
            self._most_ahead = max(self._most_ahead, self.ahead)
        elif waiting and self._samples(self._current) not in sizes:
            self._take_latest(waiting)
        self._check_is_read(shapes, sizes)
        self._check_is_whole(shapes, sizes)
        self._seen.append(self._current)

    def backward_began(self) -> HandedOut:
        """Return the batch of a backward pass: that of the latest forward pass, if one was seen since it was taken.

        Raises:
            UsageError: it cannot be told which batch it computes, or a thread has taken it that does not compute.
        """
        if not self._is_seen and self._waiting:
            self._take_latest(list(self._waiting))
        self._is_seen = False
        self._passes += 1
        if self._current.is_by_thread and self._current.dealt is not None:
            raise UsageError(refusal_of_thread())
        seen, self._seen = self._seen, []
        others = [each for each in seen if each.loader is not self._current.loader]
        if len({each.dealt.weight(self._rank) for each in (self._current, *others) if each.dealt is not None}) > 1:
            raise UsageError(refusal_of_weights())
        return self._current

    def _check_is_whole(self, shapes: Collection[Sequence[int]], sizes: Collection[int]) -> None:
        """Check that passes which do not show the samples of their batch do not compute it in parts."""
        samples = self._samples(self._current)
        if samples is None or not shapes or samples in sizes:
            self._parts = []
            return
        self._parts.append(next(iter(shapes))[0])
        if len(self._parts) > 1 and sum(self._parts) == samples:
            raise UsageError(refusal_of_parts(samples, self._parts[0]))

    def _check_is_read(self, shapes: Collection[Sequence[int]], sizes: Collection[int]) -> None:
        """Check that a pass does not compute as many samples as with equal shares, which are others than its own."""
        samples, dealt = self._samples(self._current), self._current.dealt
        if dealt is not None and samples != dealt.size in sizes and not any(samples in shape for shape in shapes):
            if self._passes and self._current.loader in self._ended:
                raise UsageError(refusal_of_repetition(self._current.loader))
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
        self._go_on_to(waiting[-1])
        self._waiting.clear()

    def _forget_unread(self, batch: HandedOut) -> None:
        """Forget batches of other iterations, over this loader or over ended ones, that were not taken ahead."""
        unread: dict[object, list[HandedOut]] = defaultdict(list)
        for each in self._waiting:
            is_over = each.loader is batch.loader or each.loader in self._ended
            if is_over and not each.is_of(batch):
                unread[each.loader, each.iteration].append(each)
        for group in unread.values():
            if len(group) > self._most_ahead:
                for each in group:
                    self._waiting.remove(each)

    def _go_on_to(self, batch: HandedOut) -> None:
        self._most_passes = max(self._most_passes, self._passes)
        self._passes = 0
        self._parts = []
        self._current = batch

    def _samples(self, batch: HandedOut) -> int | None:
        return batch.dealt.samples[self._rank] if batch.dealt is not None else None
