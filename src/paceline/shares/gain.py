"""Gain by unequal shares: the time of the updates, and what they would have taken with equal shares."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.records import Record
from paceline.recording.timed_updates import TimedUpdate, timed_updates
from paceline.shares.sample_cost import SampleCost
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
        self._costs: dict[tuple[int, float], SampleCost] = {}  # of a rank's sample, by rank and equal share

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
        self.equal_s += taken_s + self._longer_s(update)

    @property
    def ratio(self) -> float:
        """Time with equal shares over the measured one; 1 without updates."""
        return self.equal_s / self.seconds if self.seconds else 1.0

    def _longer_s(self, update: TimedUpdate) -> float:
        """Return by how much it would have been longer with equal shares, where all times were measured; else 0.

        Rank i is busy for t_i with its work w_i. Where that is the cost of its samples, it would be for t_i e_i / w_i
        with the work e_i of equal shares; else what a sample costs is measured. The rest of the update stays.
        """
        if not (all(update.seconds) and all(update.work)):
            return 0.0
        rows = list(zip(update.ranks, update.work, update.equal_work, update.seconds, strict=True))
        if [*update.work] != [*update.samples]:
            return max(t * e / w for _, w, e, t in rows) - max(update.seconds)
        equal = []
        for rank, w, e, t in rows:
            cost = self._costs.setdefault((rank, e), SampleCost(e))
            cost.add(w, t)
            equal.append(cost.with_equal_shares(w, t))
        return max(equal) - max(update.seconds)

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
