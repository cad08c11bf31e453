"""Gain by unequal shares: the time of the updates, and what they would have taken with equal shares."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.records import Record
from paceline.recording.timed_updates import TimedUpdate, timed_updates
from paceline.utils.wording import counted


class Gain:
    """Sum of the times of updates, measured and with equal shares.

    Attributes:
        updates: number of updates.
        seconds: their measured time.
        equal_s: their time with equal shares.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.seconds = self.equal_s = 0.0

    @classmethod
    def of(cls, history: Iterable[Record]) -> Gain:
        """Return the gain of a run, by its log."""
        gain = cls()
        for update in timed_updates(history):
            gain.add(update)
        return gain

    def add(self, update: TimedUpdate) -> None:
        """Add an update."""
        taken_s = update.ended_s - update.began_s
        self.updates += 1
        self.seconds += taken_s
        self.equal_s += taken_s + update.longer_s

    @property
    def ratio(self) -> float:
        """Time with equal shares over the measured one; 1 without updates."""
        return self.equal_s / self.seconds if self.seconds else 1.0

    def __str__(self) -> str:
        return (
            f"{counted(self.updates, 'update')} in {clock(self.seconds)}; "
            f"with equal shares {clock(self.equal_s)} ({self.ratio:.2f} x)"
        )


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, or as hours, minutes and seconds.

    >>> clock(8.4), clock(500), clock(3750)
    ('0:08', '8:20', '1:02:30')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
