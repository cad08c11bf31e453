"""Replay of balanced updates over recorded round trips: when the samples of each update are used."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from paceline.policies.estimators.replay.lease_trips import Leases, list_scheduling_s
from paceline.utils.state_dict import Stateful


class LeaseReplay(Stateful):
    """Replay of a queue of leases, in the form of `ProtocolReplay`: n minibatches an update, by `list_scheduling_s`.

    Args:
        trips_s: seconds of the round trips of each worker, as those of `ProtocolReplay`.
        leases: pieces of a minibatch, and by how much an update is longer.

    Attributes:
        now: time of the last update, in seconds.
        updates: number of updates.
        gradients: number of minibatches in these updates.
        schedule: staleness of the minibatches of each update: none.
        closed_s: time of each update, in seconds.

    Example:
        >>> replay = LeaseReplay([[1.0], [3.0]], Leases(pieces=4, stretch=1.0))
        >>> replay.advance(2)
        >>> replay.closed_s, replay.schedule
        ([1.5], [(0, 0)])
    """

    _saved = ("now", "updates", "gradients", "schedule", "closed_s")

    def __init__(self, trips_s: Sequence[Sequence[float]], leases: Leases) -> None:
        self._trips_s = trips_s
        self._leases = leases
        self.now = 0.0
        self.updates = 0
        self.gradients = 0
        self.schedule: list[tuple[int, ...]] = []
        self.closed_s: list[float] = []

    @property
    def assigned(self) -> int:
        """Number of round trips so far."""
        return self.gradients

    def advance(self, events: int, gradients: float = inf) -> None:
        """Replay at most so many round trips and a few more, until this many minibatches are in updates."""
        n, leases = len(self._trips_s), self._leases
        for _ in range(-(-events // n)):
            if self.gradients >= gradients:
                return
            trips_s = [of_worker[self.updates % len(of_worker)] for of_worker in self._trips_s]
            self.now += leases.stretch * list_scheduling_s(trips_s, leases.pieces, n)
            self.updates += 1
            self.gradients += n
            self.schedule.append((0,) * n)
            self.closed_s.append(self.now)
