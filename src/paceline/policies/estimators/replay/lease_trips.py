"""Round trips of whole minibatches, from the leases of the workers in an update, and how well the queue was used."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf
from statistics import median
from typing import Any, NamedTuple

from paceline.policies.estimators.replay.trip_history import Trip
from paceline.policies.shares import cost_of_lease
from paceline.utils.state_dict import Stateful, check_numbers

RECENT = 31  # costs of a lease, and updates
LEAST_TRIP_S = 1e-12
FIRST_STRETCH = 1.1


class Leases(NamedTuple):
    """Leases of an update, as they are replayed.

    Attributes:
        pieces: m, pieces of a minibatch, >= 1.
        stretch: seconds of an update over those of `list_scheduling_s`.
    """

    pieces: int
    stretch: float = FIRST_STRETCH


def list_scheduling_s(trips_s: Sequence[float], pieces: int, minibatches: float) -> float:
    """Return the seconds in which workers compute the pieces of minibatches, one by one: a bound of a queue of leases.

    A worker whose round trip is t computes a piece in t / m. So the update ends at the smallest T with
    sum(floor(m T / t_i)) >= m times the minibatches.

    Args:
        trips_s: seconds of a round trip of each worker, one or more.
        pieces: m, pieces of a minibatch, >= 1.
        minibatches: number of minibatches, > 0.

    >>> list_scheduling_s([1.0, 3.0], pieces=4, minibatches=2)
    1.5
    """
    pieces_s = [max(each, LEAST_TRIP_S) / pieces for each in trips_s]
    needed = round(minibatches * pieces)
    at_s = needed / sum(1 / each for each in pieces_s)  # no sooner
    done = [int(at_s / each) for each in pieces_s]
    ends = [((count + 1) * each, each) for count, each in zip(done, pieces_s, strict=True)]
    heapq.heapify(ends)
    for _ in range(needed - sum(done)):
        at_s, piece_s = ends[0]
        heapq.heapreplace(ends, (at_s + piece_s, piece_s))
    return at_s


class LeaseTrips(Stateful):
    """Round trips of minibatches that were computed in leases.

    A lease of a share s of a minibatch takes c + s t. The leases of a worker in an update, of the shares s_1 ... s_j
    and the seconds x_1 ... x_j, give the round trip of a whole minibatch c + sum(x_i - c) / sum(s_i), and two of them
    of different shares give c.

    Args:
        pieces: m, pieces of a minibatch, >= 1.

    Example:
        >>> trips = LeaseTrips(pieces=4)
        >>> trips.begin_update(0.0)
        >>> for share, seconds in ((0.5, 1.1), (0.5, 1.1), (0.25, 0.6)):
        ...     trips.add(0, share, seconds)
        >>> [(worker, round(trip.seconds, 2)) for worker, trip in trips.end_update(2.8)], round(trips.cost_s, 2)
        ([(0, 2.1)], 0.1)
    """

    _saved = ("_begun_s", "_knows_speeds", "_open", "_cancelled", "_firsts", "_costs", "_updates")

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces
        self._begun_s = inf  # time at which the update was opened; inf for none in leases
        self._knows_speeds = False  # the update before was in leases too, so that first leases follow speeds
        self._open: dict[int, tuple[float, float, int]] = {}  # shares, seconds and leases of each worker
        self._cancelled: dict[int, tuple[float, float]] = {}  # share and seconds of a cancelled lease
        self._firsts: dict[int, tuple[float, float]] = {}  # share and seconds of the first lease
        self._costs: list[float] = []
        self._updates: list[tuple[float, float]] = []  # seconds of each one, and those of list scheduling

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state.

        Raises:
            TypeError: an entry is no number.
        """
        super().load_state_dict(state)
        for part in (self._open, self._cancelled, self._firsts):
            check_numbers("leases", [*part, *chain(*part.values())])
        check_numbers("costs of a lease", self._costs)
        check_numbers("seconds of updates", chain(*self._updates))

    @property
    def cost_s(self) -> float:
        """Seconds of a lease, whatever its samples; 0 while they are unknown."""
        return max(0.0, median(self._costs)) if self._costs else 0.0

    @property
    def leases(self) -> Leases:
        """Leases as those of the latest updates."""
        if not self._updates:
            return Leases(self._pieces)
        took_s, least_s = map(sum, zip(*self._updates, strict=True))
        return Leases(self._pieces, took_s / least_s)

    def begin_update(self, now: float) -> None:
        """Begin an update in leases, at a time in seconds."""
        self._begun_s = now

    def add(self, worker: int, share: float, seconds: float) -> None:
        """Add the round trip of a lease of this share of a minibatch."""
        cost_s = cost_of_lease(self._firsts.setdefault(worker, (share, seconds)), (share, seconds))
        if cost_s is not None:
            self._costs = [*self._costs[1 - RECENT :], cost_s]
        shares, total_s, count = self._open.get(worker, (0.0, 0.0, 0))
        self._open[worker] = (shares + share, total_s + seconds, count + 1)

    def add_cancelled(self, worker: int, share: float, elapsed_s: float) -> None:
        """Add a lease that was cancelled after these seconds."""
        self._cancelled[worker] = (share, elapsed_s)

    def end_update(self, now: float) -> list[tuple[int, Trip]]:
        """Return the round trip of each worker in the update that has ended.

        That of a cancelled lease counts if the worker has ended none, and where it says more than those that it has.
        """
        trips = {
            worker: Trip(self._whole_s(share, total_s, count)) for worker, (share, total_s, count) in self._open.items()
        }
        for worker, (share, elapsed_s) in self._cancelled.items():
            least = Trip(self._whole_s(share, elapsed_s, 1), censored=True)
            if worker not in trips or trips[worker].seconds < least.seconds:
                trips[worker] = least
        minibatches = sum(share for share, *_ in self._open.values())
        has_begun = now > self._begun_s
        if trips and minibatches * self._pieces >= 1 and has_begun and self._knows_speeds:
            least_s = list_scheduling_s([each.seconds for each in trips.values()], self._pieces, minibatches)
            self._updates = [*self._updates[1 - RECENT :], (now - self._begun_s, least_s)]
        self._begun_s = inf
        self._knows_speeds = has_begun
        for part in (self._open, self._cancelled, self._firsts):
            part.clear()
        return sorted(trips.items())

    def _whole_s(self, share: float, seconds: float, count: int) -> float:
        """Return the seconds of a whole minibatch: c + (seconds - count c) / share."""
        cost_s = min(self.cost_s, seconds / (2 * count))
        return cost_s + (seconds - count * cost_s) / share
