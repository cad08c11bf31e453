"""Facts about a run that its ranks and launchers write in the store where they meet."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

from paceline.clusters.launch_env import HOST, SILENCE, SURVIVES, UNFIT
from paceline.shares.survival.replicas import told_replicas
from paceline.shares.survival.roll import Roll, tell_loss, told


class RunFacts:
    """What the ranks have told about a run, and which of them live.

    Args:
        store: client of the store; None if there is none yet, or it is not reached: then nothing is known.
        ranks: number of ranks of all hosts.
    """

    def __init__(self, store: Any, ranks: int) -> None:
        self._store = store
        self._ranks = ranks

    def text(self, key: str) -> str:
        """Return a text; empty if it was not written."""
        return self._store.get(key).decode() if self._store is not None and self._store.check([key]) else ""

    def holds(self, fact: str) -> bool:
        """Return whether a fact about the run holds, as rank 0 has told."""
        return bool(self.text(fact))

    @property
    def living(self) -> frozenset[int]:
        """Ranks that live."""
        return frozenset(self._roll().living)

    def tell_loss(self, rank: int) -> bool:
        """Tell the ranks that one has ended; return whether it was one that lives."""
        return self._store is not None and tell_loss(self._store, rank, self._ranks)

    def survivors(self) -> tuple[int, ...]:
        """Return the ranks that live and can go on without the others; none if they cannot."""
        return self._roll().living if self.holds(SURVIVES) and not self.holds(UNFIT) else ()

    def silence_s(self) -> float:
        """Return the seconds for which a rank may be silent; inf if the others cannot go on without it."""
        given = self.text(SILENCE) if self.survivors() else ""
        return float(given) if given else inf

    def heartbeats(self, hosts: Iterable[int]) -> dict[int, int]:
        """Return the number of heartbeats of each host."""
        return {host: int(self.text(f"{HOST}/{host}") or 0) for host in hosts}

    def _roll(self) -> Roll:
        return Roll.called(told_replicas(self._store, self._ranks), told(self._store, self._ranks))
