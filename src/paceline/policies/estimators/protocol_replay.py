"""Replay of a protocol over recorded round trips: the five-knob rules without a coordinator, for speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any

from paceline.errors import UsageError
from paceline.protocols.protocol import Protocol
from paceline.utils.state_dict import Stateful
from paceline.utils.validation import check_range


class ProtocolReplay(Stateful):
    """Replay of a protocol on workers whose round trips are given: times and stalenesses of its updates.

    The updates are those of a `Coordinator` with the same round trips, as long as no worker joins or is lost and the
    data do not end.

    Args:
        protocol: protocol, with constant knobs.
        trips_s: seconds of the round trips of each worker, >= 0, one or more; repeated from the first one after the
            last. Cancelled work uses up its trip too.

    Attributes:
        now: time of the latest arrival, in seconds.
        gradients: number of gradients in updates.
        schedule: staleness of each gradient of each update, in versions.
        closed_s: time of each update, in seconds.

    Raises:
        UsageError: a worker has no round trip, or the quorum is larger than the number of workers can reach.

    Example:
        >>> from paceline.catalogue.protocols import k_async
        >>> replay = ProtocolReplay(k_async(k=1), [[1.0], [1.5]]).run(gradients=4)
        >>> replay.closed_s, replay.schedule
        ([1.0, 1.5, 2.0, 3.0], [(0,), (1,), (1,), (1,)])
    """

    _saved = (
        "now",
        "gradients",
        "schedule",
        "closed_s",
        "_heap",
        "_sequence",
        "_draws",
        "_versions",
        "_contributed",
        "_delivered",
        "_in_flight",
        "_idle",
        "_held",
        "_awaited",
    )

    def __init__(self, protocol: Protocol, trips_s: Sequence[Sequence[float]]) -> None:
        n = len(trips_s)
        if not n or not all(trips_s):
            raise UsageError(f"trips_s={trips_s!r} has a worker without a round trip, or no worker")
        for trips in trips_s:
            for trip_s in trips:
                check_range("[0, inf)", trip_s=trip_s)
        protocol.check_workers(n)
        self._trips_s = trips_s
        self._quorum = inf if protocol.quorum == "all" else protocol.quorum
        self._max_staleness = protocol.max_staleness
        self._max_lead = protocol.max_lead
        self._refills_at_update = protocol.refill == "update"
        self._interrupts = protocol.on_update == "interrupt"
        self.now = 0.0
        self.gradients = 0
        self.schedule: list[tuple[int, ...]] = []
        self.closed_s: list[float] = []
        self._heap: list[tuple[float, int, int]] = []
        self._sequence = 0
        self._draws = [0] * n
        self._versions = [0] * n
        self._contributed = [-1] * n  # version when the latest gradient was accepted
        self._delivered = [0] * n
        self._in_flight: dict[int, int] = {}  # sequence number of the work of each busy worker, in that order
        self._idle: dict[int, None] = dict.fromkeys(range(n))
        self._held: list[int] = []  # stalenesses
        self._awaited: set[int] = set()  # by an update that waits for all workers
        self._open()

    @property
    def updates(self) -> int:
        """Number of updates."""
        return len(self.schedule)

    def run(self, gradients: int) -> ProtocolReplay:
        """Replay until at least this many gradients are in updates, and return the replay."""
        while self.gradients < gradients:
            self.advance(gradients - self.gradients)
        return self

    def advance(self, events: int) -> None:
        """Replay this many arrivals."""
        heap, in_flight, idle, held = self._heap, self._in_flight, self._idle, self._held
        quorum, awaited, max_staleness = self._quorum, self._awaited, self._max_staleness
        is_bounded = self._max_lead < inf
        while events > 0:
            self.now, sequence, worker = heappop(heap)
            if in_flight.get(worker) != sequence:
                continue  # it was cancelled
            events -= 1
            del in_flight[worker]
            idle[worker] = None
            version = len(self.schedule)
            staleness = version - self._versions[worker]
            if staleness <= max_staleness:
                self._contributed[worker] = version
                held.append(staleness)
                awaited.discard(worker)
            is_released = is_bounded and self._deliver(worker)
            if len(held) >= quorum or (held and quorum == inf and not awaited):
                self._close()
            elif is_released:
                self._refill()
            elif self._may_start(worker):
                self._give(worker)
            if held and not in_flight:
                self._close()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a replay of the same protocol and round trips."""
        super().load_state_dict(state)
        self._heap = [tuple(each) for each in self._heap]  # type: ignore[misc]
        self.schedule = [tuple(each) for each in self.schedule]

    def _deliver(self, worker: int) -> bool:
        """Count a delivered gradient; return whether the least count has risen."""
        delivered = self._delivered
        least = min(delivered)
        delivered[worker] += 1
        return min(delivered) > least

    def _close(self) -> None:
        """Make the update of the gradients that are held, and open the next one."""
        held = self._held
        self.schedule.append(tuple(held))
        self.closed_s.append(self.now)
        self.gradients += len(held)
        held.clear()
        if self._interrupts:
            oldest = len(self.schedule) - self._max_staleness
            for worker in [each for each in self._in_flight if self._versions[each] < oldest]:
                del self._in_flight[worker]
                self._idle[worker] = None
        self._open()

    def _open(self) -> None:
        self._refill()
        if self._quorum == inf:
            self._awaited.clear()
            self._awaited.update(self._in_flight)

    def _refill(self) -> None:
        for worker in list(self._idle):
            if self._may_start(worker):
                self._give(worker)

    def _may_start(self, worker: int) -> bool:
        if self._refills_at_update and self._contributed[worker] == len(self.schedule):
            return False
        return self._max_lead == inf or self._delivered[worker] - min(self._delivered) <= self._max_lead

    def _give(self, worker: int) -> None:
        del self._idle[worker]
        trips_s, draw = self._trips_s[worker], self._draws[worker]
        self._draws[worker] = draw + 1
        self._versions[worker] = len(self.schedule)
        self._sequence = sequence = self._sequence + 1
        self._in_flight[worker] = sequence
        heappush(self._heap, (self.now + trips_s[draw % len(trips_s)], sequence, worker))
