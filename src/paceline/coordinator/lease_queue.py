"""Queue of the samples of an update, from which workers take leases until each sample is used once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.coordinator.minibatch_slices import dealt, lease, samples_of, taken
from paceline.core.events import Minibatch, MinibatchSlice
from paceline.errors import UsageError
from paceline.policies.controllers.base import LeaseRule
from paceline.utils.state_dict import Stateful


class LeaseQueue(Stateful):
    """Queue of the samples of one update, of which each is used once.

    A worker takes its first lease, and then pieces of what is left. A worker that finds nothing left repeats the lease
    that has been under way longest: the first of the two copies that arrives counts, so a worker that hangs delays the
    update by one lease.

    Args:
        slices: samples of each minibatch of the update, by worker.
        shares: samples of the first lease of each worker, >= 1.
        batch_size: samples of a whole minibatch, >= 1.
        rule: leases after the first ones.

    Attributes:
        minibatches: number of minibatches of the update.

    Raises:
        UsageError: the first leases have more samples than the update.

    Source: self-scheduling of a loop's iterations in chunks (Polychronopoulos and Kuck, "Guided self-scheduling",
    1987); backup tasks (Dean and Ghemawat, "MapReduce", 2004).
    """

    _saved = ("minibatches", "_batch_size", "_piece", "_repeats", "_first", "_left", "_under_way")

    def __init__(
        self,
        slices: Mapping[int, Sequence[MinibatchSlice]],
        shares: Mapping[int, int],
        batch_size: int,
        rule: LeaseRule,
    ) -> None:
        self.minibatches = len(slices)
        self._batch_size = batch_size
        self._piece = rule.piece
        self._repeats = rule.repeats
        samples = sum(map(samples_of, slices.values()))
        if samples < rule.minibatches * batch_size:  # the end of the data
            shares = {}
        elif sum(shares.values()) > samples or min(shares.values(), default=1) < 1:
            raise UsageError(
                f"a controller asked for first leases of {dict(shares)} samples in an update of {samples}; expected at "
                "least one sample each, and no more than these in all"
            )
        first, self._left = dealt(slices, shares)
        self._first = {worker: lease(each, batch_size) for worker, each in first.items()}
        self._under_way: dict[int, Minibatch] = {}  # by worker, the oldest first

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> LeaseQueue:
        """Return the queue with such a state."""
        queue = cls({}, {}, 1, LeaseRule(0, 1, repeats=False))
        queue.load_state_dict(state)
        return queue

    @property
    def is_done(self) -> bool:
        """Whether each sample is used."""
        return not (self._first or self._left or self._under_way)

    def has_next(self, worker: int) -> bool:
        """Return whether there is a lease for an idle worker now."""
        return worker in self._first or bool(self._left) or self._repeatable() is not None

    def take(self, worker: int) -> Minibatch:
        """Return the next lease of an idle worker, for which there is one."""
        work = self._first.pop(worker, None)
        if work is None and self._left:
            piece, self._left = taken(self._left, self._piece)
            work = lease(piece, self._batch_size)
        if work is None:
            work = self._repeatable()
            assert work is not None
        self._under_way[worker] = work
        return work

    def end(self, worker: int) -> list[int]:
        """End the lease that a worker has delivered; return the workers that repeat it, or that it has repeated."""
        work = self._under_way.pop(worker)
        others = [other for other, each in self._under_way.items() if each == work]
        for other in others:
            del self._under_way[other]
        return others

    def give_back(self, worker: int) -> None:
        """Queue the lease of a worker again, unless it has ended or another worker has a copy."""
        work = self._under_way.pop(worker, None)
        if work is not None and work not in self._under_way.values():
            self._left = [*work.slices, *self._left]

    def leave(self, worker: int) -> None:
        """Queue the first lease of a worker that is gone."""
        work = self._first.pop(worker, None)
        if work is not None:
            self._left = [*work.slices, *self._left]

    def unused(self) -> list[Minibatch]:
        """Return what no worker has, as leases of at most a minibatch."""
        left = [each for work in self._first.values() for each in work.slices] + self._left
        leases = []
        while left:
            part, left = taken(left, self._batch_size)
            leases.append(lease(part, self._batch_size))
        return leases

    def _repeatable(self) -> Minibatch | None:
        """Return the oldest lease that is under way once."""
        if not self._repeats:
            return None
        counts = Counter(self._under_way.values())
        return next((work for work in self._under_way.values() if counts[work] == 1), None)
