"""Replay of a protocol over recorded round trips: when its updates are made, and how stale their gradients are.

The rules are those of the coordinator with a constant protocol and constant workers: no worker is lost, no controller
acts, and the data do not end. One arrival is handled at a time, in the order of (time, order in which the work was
given).

The coordinator also makes an update if gradients are held and no worker computes. Here the quorum is always reached
first. Suppose that no worker computes, and let worker m be one that has delivered fewest. The lead does not block m, so
m waits because it has contributed to this update. Another worker that has not contributed to it began its latest work
before m delivered, since later work is fresh and accepted. It was then within the lead of m, still is, and so may
start. Thus all n workers have contributed, and the quorum is at most n if workers wait for updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf
from numbers import Integral, Real
from operator import itemgetter

from paceline.errors import UsageError
from paceline.protocols.protocol import Protocol
from paceline.utils.state_dict import Stateful
from paceline.utils.validation import check_range

InFlight = tuple[float, int, int, int]  # (arrival in s, sequence number, worker, version)

MOST_ARRIVALS = 100_000  # without an update, in addition to those that every protocol may need
_SEQUENCE, _VERSION = itemgetter(1), itemgetter(3)


class ProtocolReplay(Stateful):
    """Replay of a protocol: times and staleness of the updates that it makes of given round trips.

    All workers start at time 0. Work that is interrupted uses up its round trip.

    Args:
        protocol: protocol of the whole replay.
        trips_s: seconds of the round trips of each worker, >= 0 and finite, in the order in which the worker is given
            work; repeated from the beginning when all are used up. Every worker needs at least one.

    Attributes:
        now: time of the last update, in seconds.
        updates: number of updates.
        gradients: number of gradients in these updates.
        schedule: staleness of the gradients of each update, in the order of their arrival.
        closed_s: time of each update, in seconds.

    Raises:
        UsageError: there are no workers or too few for the quorum, or a worker has no round trip or an invalid one.

    Example:
        >>> from paceline.catalogue.protocols import asp
        >>> replay = ProtocolReplay(asp(), [[1.0], [2.5]]).run(gradients=4)
        >>> replay.closed_s, replay.schedule
        ([1.0, 2.0, 2.5, 3.0], [(0,), (0,), (2,), (1,)])
    """

    _saved = (
        "now",
        "updates",
        "gradients",
        "schedule",
        "closed_s",
        "heap",
        "sequence",
        "position",
        "held",
        "idle",
        "contributed",
        "oldest",
        "delivered",
        "fewest",
        "at_fewest",
    )

    def __init__(self, protocol: Protocol, trips_s: Sequence[Sequence[float]]) -> None:
        self._trips_s = _checked(trips_s)
        n = len(self._trips_s)
        protocol.check_workers(n)
        self._max_staleness = protocol.max_staleness
        self._interrupts = protocol.on_update == "interrupt"
        self._waits = protocol.refill == "update"
        self._max_lead = protocol.max_lead
        self._quorum = n if protocol.quorum == "all" else protocol.quorum
        # With a refill on arrival, n gradients need not be of n workers.
        self._awaits_each = protocol.quorum == "all" and not self._waits
        self._name = protocol.name
        self.now = 0.0
        self.updates = 0
        self.gradients = 0
        self.schedule: list[tuple[int, ...]] = []
        self.closed_s: list[float] = []
        self._heap: list[InFlight] = []
        self._sequence = 0
        self._position = [0] * n  # of the next round trip of each worker
        self._held: list[int] = []  # staleness of the accepted gradients
        self._idle = list(range(n))  # in the order in which they became idle
        self._contributed = [-1] * n  # version at the latest accepted gradient of each worker
        self._oldest = 0  # no work in flight has an older version
        self._delivered = [0] * n
        self._fewest = 0
        self._at_fewest = n  # workers that have delivered the fewest
        self._refill(0.0)

    @property
    def assigned(self) -> int:
        """Number of times that a worker was given work."""
        return self._sequence

    def run(self, gradients: int) -> ProtocolReplay:
        """Continue until at least this many gradients are in updates, and return the replay itself.

        Raises:
            UsageError: many gradients arrive and no update is made. This happens if the quorum is all workers, refilled
                on arrival, and some deliver in no time, or almost none, while another one computes.
        """
        most = MOST_ARRIVALS + len(self._trips_s) + self._quorum
        check_range("[0, inf)", Integral, gradients=gradients)
        while self.gradients < gradients:
            before = self.updates
            self._process(most, gradients)
            if self.updates == before:
                raise UsageError(
                    f"{self._name}: no update is made in {most} arrivals after {self.now:g} s, because a worker is far "
                    "slower than the others; give longer round trips, or a protocol with a number as quorum"
                )
        return self

    def advance(self, events: int, gradients: float = inf) -> None:
        """Process at most this many arrivals, >= 0, until this many gradients are in updates."""
        check_range("[0, inf)", Integral, events=events)
        self._process(events, gradients)

    def _process(self, events: int, enough: float) -> None:
        """Process at most so many arrivals, until enough gradients are in updates."""
        trips_s, position, heap, held, idle = self._trips_s, self._position, self._heap, self._held, self._idle
        contributed, max_staleness, quorum = self._contributed, self._max_staleness, self._quorum
        waits, is_bounded, awaits_each = self._waits, self._max_lead < inf, self._awaits_each
        updates = self.updates
        for _ in range(events):
            now, _, worker, version = heappop(heap)
            refills = is_bounded and self._deliver(worker)
            starts = not is_bounded or self._is_within_lead(worker)
            if updates - version <= max_staleness:
                held.append(updates - version)
                contributed[worker] = updates
                if len(held) >= quorum and not (awaits_each and contributed.count(updates) < len(contributed)):
                    idle.append(worker)
                    self._close(now)
                    if self.gradients >= enough:
                        return
                    updates += 1
                    continue
                starts = starts and not waits
            if starts and not refills:
                self._sequence = sequence = self._sequence + 1
                own, i = trips_s[worker], position[worker]
                position[worker] = (i + 1) % len(own)
                heappush(heap, (now + own[i], sequence, worker, updates))
            else:
                idle.append(worker)
                if refills:
                    self._refill(now)

    def _close(self, now: float) -> None:
        """Make an update of the gradients held, and give work to the workers that may start."""
        self.now = now
        self.updates += 1
        self.gradients += len(self._held)
        self.schedule.append(tuple(self._held))
        self.closed_s.append(now)
        self._held.clear()
        if self._interrupts and self.updates - self._max_staleness > self._oldest:
            self._interrupt_stale()
        self._refill(now)

    def _interrupt_stale(self) -> None:
        """Interrupt work that would be too stale; its workers become idle in the order in which it was given."""
        heap, bound = self._heap, self.updates - self._max_staleness
        stale = [work for work in heap if work[3] < bound]
        if stale:
            self._idle += [work[2] for work in sorted(stale, key=_SEQUENCE)]
            heap[:] = [work for work in heap if work[3] >= bound]
            heapify(heap)
        # Until this version is too old too, nothing is to interrupt.
        self._oldest = min(map(_VERSION, heap), default=self.updates)

    def _refill(self, now: float) -> None:
        """Give work to every idle worker that may start."""
        trips_s, position, heap, updates, idle = self._trips_s, self._position, self._heap, self.updates, self._idle
        sequence, contributed, blocked = self._sequence, self._contributed, []
        waits, is_bounded = self._waits, self._max_lead < inf
        for worker in idle:
            if (waits and contributed[worker] == updates) or (is_bounded and not self._is_within_lead(worker)):
                blocked.append(worker)
                continue
            sequence += 1
            own, i = trips_s[worker], position[worker]
            position[worker] = (i + 1) % len(own)
            heappush(heap, (now + own[i], sequence, worker, updates))
        idle[:] = blocked
        self._sequence = sequence

    def _deliver(self, worker: int) -> bool:
        """Count a gradient, accepted or not; return whether the fewest gradients of a worker are more now."""
        before = self._delivered[worker]
        self._delivered[worker] = before + 1
        if before > self._fewest:
            return False
        self._at_fewest -= 1
        if self._at_fewest:
            return False
        self._fewest += 1
        self._at_fewest = self._delivered.count(self._fewest)
        return True

    def _is_within_lead(self, worker: int) -> bool:
        """Return whether the worker is not too many gradients ahead."""
        return self._delivered[worker] - self._fewest <= self._max_lead


def _checked(trips_s: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return a copy of the round trips as plain numbers."""
    if not len(trips_s):
        raise UsageError("trips_s has no worker; give the round trips of at least one")
    for worker, of_worker in enumerate(trips_s):
        if not len(of_worker):
            raise UsageError(f"worker {worker} has no round trip in trips_s; give at least one")
        for trip_s in of_worker:
            is_number = type(trip_s) is float or isinstance(trip_s, Real)  # the second test is slow
            if not is_number or not 0 <= trip_s < inf:
                raise UsageError(f"round trip {trip_s!r} of worker {worker} is not a number of seconds in [0, inf)")
    return [list(map(float, of_worker)) for of_worker in trips_s]
