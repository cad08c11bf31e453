"""Progress of a phase towards its end."""

from __future__ import annotations

from math import inf

from paceline.core.duration import Duration
from paceline.utils.state_dict import Stateful


class PhaseProgress(Stateful):
    """Progress of a phase towards its end.

    Updates that a controller makes under another protocol may be left out of the count. Positions are those of the
    run, in the unit of the end.

    Args:
        end: end of the phase; None for the end of the run.

    Example:
        >>> progress = PhaseProgress(Duration("updates", 100))
        >>> progress.pause(40)
        >>> progress.resume(70)
        >>> progress.is_done(100), progress.ends_at
        (False, 130.0)
    """

    _saved = ("left_out", "paused_at")

    def __init__(self, end: Duration | None) -> None:
        self.end = end
        self._left_out = 0.0
        self._paused_at: float | None = None

    @property
    def ends_at(self) -> float:
        """Position where the phase ends, if nothing more is left out."""
        return inf if self.end is None else self.end.amount + self._left_out

    def is_done(self, position: float) -> bool:
        """Return whether the phase is over at this position of the run."""
        return (position if self._paused_at is None else self._paused_at) >= self.ends_at

    def pause(self, position: float) -> None:
        """Stop counting at this position."""
        if self._paused_at is None:
            self._paused_at = position

    def resume(self, position: float) -> None:
        """Count again from this position."""
        if self._paused_at is not None:
            self._left_out += position - self._paused_at
            self._paused_at = None
