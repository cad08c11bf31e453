"""Queue of the samples of an update, from which workers take leases until each sample is used once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.coordinator.minibatch_slices import dealt, lease, samples_of, take
from paceline.core.events import Minibatch, MinibatchSlice
from paceline.errors import UsageError
from paceline.policies.controllers.base import LeaseRule
from paceline.utils.state_dict import Stateful


class LeaseQueue(Stateful):
    """Queue of the samples of one update, of which each is used once.

    A worker takes its first lease, and then more of what is left. A worker that finds nothing left repeats the lease
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

    _saved = ("minibatches", "_batch_size", "_piece", "_repeats", "_first", "_under_way", "_copies", "_once")

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
        self._under_way: dict[int, Minibatch] = {}  # by worker
        self._copies: dict[int, int] = {}  # of two workers with the same lease, the other one
        self._once: dict[int, None] = {}  # workers whose lease no other one has, the oldest lease first

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> LeaseQueue:
        """Return the queue with such a state."""
        queue = cls({}, {}, 1, LeaseRule(0, 1, repeats=False))
        queue.load_state_dict(state)
        return queue

    def state_dict(self) -> dict[str, Any]:
        """Return what is dealt, and what is left."""
        return {**super().state_dict(), "left": list(self._left)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        super().load_state_dict(state)
        self._left = deque(state["left"])

    @property
    def is_done(self) -> bool:
        """Whether each sample is used."""
        return not (self._first or self._left or self._under_way)

    def has_next(self, worker: int) -> bool:
        """Return whether there is a lease for an idle worker now."""
        return worker in self._first or bool(self._left) or (self._repeats and bool(self._once))

    def take(self, worker: int) -> Minibatch:
        """Return the next lease of an idle worker, for which there is one."""
        if worker in self._first:
            work = self._first.pop(worker)
        elif self._left:
            work = lease(take(self._left, self._piece), self._batch_size)
        else:
            return self._repeat(worker)
        self._under_way[worker] = work
        self._once[worker] = None
        return work

    def end(self, worker: int) -> int | None:
        """End the lease that a worker has delivered; return the worker that has a copy of it, if there is one."""
        del self._under_way[worker]
        self._once.pop(worker, None)
        other = self._part(worker)
        if other is not None:
            del self._under_way[other]
        return other

    def give_back(self, worker: int) -> bool:
        """Queue the lease of a worker again, unless it has ended or another worker has a copy.

        Returns:
            Whether there is more for idle workers than before.
        """
        work = self._under_way.pop(worker, None)
        if work is None:
            return False
        self._once.pop(worker, None)
        other = self._part(worker)
        if other is not None:
            self._once[other] = None
        else:
            self._left.extendleft(reversed(work.slices))
        return True

    def use_up(self) -> None:
        """Count all samples as used: those that are left, and those under way."""
        for part in (self._first, self._left, self._under_way, self._copies, self._once):
            part.clear()

    def leave(self, worker: int) -> None:
        """Queue the first lease of a worker that is gone."""
        work = self._first.pop(worker, None)
        if work is not None:
            self._left.extendleft(reversed(work.slices))

    def _repeat(self, worker: int) -> Minibatch:
        """Return the oldest lease that is under way once, for a second worker."""
        other = next(iter(self._once))
        del self._once[other]
        self._copies[worker], self._copies[other] = other, worker
        self._under_way[worker] = work = self._under_way[other]
        return work

    def _part(self, worker: int) -> int | None:
        """Return the other worker with the same lease, which has it alone from now on; None if there is none."""
        other = self._copies.pop(worker, None)
        if other is not None:
            del self._copies[other]
        return other
