"""Ranks that have come to the end of the script while this rank still waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.shares.survival.living_group import Operation


class EndedRanks:
    """Account of ranks that have ended, as a thread looks from time to time.

    Attributes:
        awaited: operation that this rank waits for; None before the first.
        found: ranks that have ended too early.
    """

    def __init__(self) -> None:
        self.awaited: Operation | None = None
        self.found: Sequence[int] = ()
        self._suspected: Operation | None = None  # that was awaited at the last look, when a rank had ended

    def look(self, ended: Callable[[], Sequence[int]]) -> bool:
        """Return whether this rank has waited in one operation at two looks since another rank has ended.

        Args:
            ended: function that returns the ranks that have ended.
        """
        awaited = self.awaited
        suspected, self._suspected = self._suspected, None
        if awaited is None or awaited.future.done() or not (found := ended()):
            return False
        if awaited is suspected:
            self.found = found
        else:
            self._suspected = awaited
        return awaited is suspected
