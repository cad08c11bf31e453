"""How far a phase is towards its end."""

from __future__ import annotations

from math import inf

from paceline.extent import Extent


class PhaseShare:
    """The part of a phase that counts towards its end.

    What is made under a protocol that a controller takes to in between may have to be made up for: then it does not
    count. Positions are those of the run, in the unit of the end.

    Example:
        >>> share = PhaseShare(Extent("updates", 100))
        >>> share.pause(40)
        >>> share.go_on(70)
        >>> share.is_done(100), share.ends_at
        (False, 130.0)
    """

    def __init__(self, end: Extent | None) -> None:
        self.end = end
        self._left_out = 0.0
        self._paused_at: float | None = None

    @property
    def ends_at(self) -> float:
        """Where the phase will end, if nothing more is left out."""
        return inf if self.end is None else self.end.amount + self._left_out

    def is_done(self, position: float) -> bool:
        """Return whether a phase that is so far is at its end."""
        return (position if self._paused_at is None else self._paused_at) >= self.ends_at

    def pause(self, position: float) -> None:
        """Count no further from here on."""
        if self._paused_at is None:
            self._paused_at = position

    def go_on(self, position: float) -> None:
        """Count again from here on."""
        if self._paused_at is not None:
            self._left_out += position - self._paused_at
            self._paused_at = None

    def state_dict(self) -> dict[str, float | None]:
        """Return what was left out."""
        return {"left_out": self._left_out, "paused_at": self._paused_at}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Go on from such a state of the same end."""
        self._left_out = state["left_out"] or 0.0
        self._paused_at = state["paused_at"]
