"""Rank that writes the record of a run in which ranks may be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

RECORDER = "paceline/recorder"  # in the launcher's store: number of the rank that writes


class RecordingRank:
    """Choice of the rank that writes: rank 0 at first, and later the first one that lives.

    Args:
        store: launcher's store.
        rank: number of this rank.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank

    def begins(self) -> bool:
        """Return whether this rank, which begins with the others, writes."""
        if self._rank == 0:
            self._store.set(RECORDER, "0")
        return self._rank == 0

    def inherits(self, living: Sequence[int]) -> bool:
        """Return whether this rank goes on with the record of a rank that is lost."""
        if self._rank != living[0] or int(self._store.get(RECORDER)) in living:
            return False
        self._store.set(RECORDER, str(self._rank))
        return True
