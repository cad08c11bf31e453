"""Scores of protocols: progress per second, from a replay over recorded round trips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.policies.estimators.noise.staleness_price import PLAIN, Reference, StabilityScan
from paceline.policies.estimators.replay.lease_replay import LeaseReplay
from paceline.policies.estimators.replay.lease_trips import Leases
from paceline.policies.estimators.replay.protocol_replay import ProtocolReplay
from paceline.protocols.protocol import Protocol

LEAST_GRADIENTS = 160  # replayed for each protocol
GRADIENTS_OF_WORKER = 12
FIRST = 0.25  # share of the replay that is left out, because all workers start at once
PIECE = 16  # arrivals of a replay, or updates of a scan, at once
WORK_OF_UPDATE = 6  # of a scan
EIGHTHS = Leases(pieces=8)


class Score(NamedTuple):
    """Score of a protocol.

    Attributes:
        protocol: name of the protocol.
        gradients_per_s: Lambda, accepted gradients per second.
        k: K, gradients of an update on average.
        price: d, price of staleness, >= 1.
        staleness: mean staleness of the gradients, in versions.
    """

    protocol: str
    gradients_per_s: float
    k: float
    price: float
    staleness: float = 0.0


class Scoring:
    """Scores of several protocols on the same round trips, computed in small pieces.

    Args:
        protocols: protocols to score, one or more.
        trips_s: round trips of each worker, in seconds.
        reference: what stale updates are compared with for their price.
        leases: leases of protocols that have a queue of them.

    Attributes:
        scores: scores so far, in the order of the protocols.
    """

    def __init__(
        self,
        protocols: Sequence[Protocol],
        trips_s: Sequence[Sequence[float]],
        reference: Reference = PLAIN,
        leases: Leases = EIGHTHS,
    ) -> None:
        self._protocols = list(protocols)
        self._trips_s = [list(trips) for trips in trips_s]
        self._reference = reference
        self._leases = leases
        self.scores: list[Score] = []
        self._replay: ProtocolReplay | LeaseReplay | None = None
        self._scan: StabilityScan | None = None

    @property
    def is_done(self) -> bool:
        """Whether every protocol has its score."""
        return len(self.scores) == len(self._protocols)

    def advance(self, work: int) -> None:
        """Do at most so much work, and a little more: one unit for each round trip that is replayed."""
        while work > 0 and not self.is_done:
            work -= self._advance_one()

    def _advance_one(self) -> int:
        """Advance the current protocol by a small step, and return its work."""
        protocol = self._protocols[len(self.scores)]
        if self._replay is None:
            self._replay = self._replay_of(protocol)
            return self._replay.assigned
        enough = max(LEAST_GRADIENTS, GRADIENTS_OF_WORKER * len(self._trips_s))
        if self._replay.gradients < enough:
            before = self._replay.assigned
            self._replay.advance(PIECE, enough)
            return PIECE + self._replay.assigned - before
        if self._scan is None:
            self._scan = StabilityScan(steady(self._replay), self._reference)
        if not self._scan.is_done:
            self._scan.advance(PIECE)
            return PIECE * WORK_OF_UPDATE
        self.scores.append(score_of(protocol.name, self._replay, self._reference.price_at(self._scan.step)))
        self._replay = self._scan = None
        return 0

    def _replay_of(self, protocol: Protocol) -> ProtocolReplay | LeaseReplay:
        if protocol.refill == "share":
            return LeaseReplay(self._trips_s, self._leases)
        return ProtocolReplay(protocol, self._trips_s)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without the protocols."""
        return {
            "trips_s": self._trips_s,
            "reference": tuple(self._reference),
            "leases": tuple(self._leases),
            "scores": [tuple(score) for score in self.scores],
            "replay": self._replay.state_dict() if self._replay is not None else None,
            "scanned": self._scan.updates if self._scan is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state of the same protocols."""
        self._trips_s = [list(trips) for trips in state["trips_s"]]
        self._reference = Reference(*state["reference"])
        self._leases = Leases(*state.get("leases", EIGHTHS))  # missing in early runs
        self.scores = [Score(*score) for score in state["scores"]]
        self._replay = None
        if state["replay"] is not None:
            self._replay = self._replay_of(self._protocols[len(self.scores)])
            self._replay.load_state_dict(state["replay"])
        self._scan = None
        if self._replay is not None and state["scanned"] is not None:
            self._scan = StabilityScan(steady(self._replay), self._reference)
            self._scan.advance(state["scanned"])


def steady(replay: ProtocolReplay | LeaseReplay) -> list[tuple[int, ...]]:
    """Return the schedule of a replay without its beginning, where all workers start at once."""
    return replay.schedule[_first(replay) :]


def score_of(name: str, replay: ProtocolReplay | LeaseReplay, price: float) -> Score:
    """Return the score of a protocol from its replay and its price of staleness."""
    first, updates = _first(replay), steady(replay)
    gradients = sum(map(len, updates))
    begun_s = replay.closed_s[first - 1] if first else 0.0
    elapsed_s = max(replay.now - begun_s, 1e-12)
    staleness = sum(map(sum, updates)) / gradients
    return Score(
        protocol=name,
        gradients_per_s=gradients / elapsed_s,
        k=gradients / len(updates),
        price=price,
        staleness=staleness,
    )


def _first(replay: ProtocolReplay | LeaseReplay) -> int:
    return int(FIRST * replay.updates)
