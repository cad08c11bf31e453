"""Gain by unequal shares: the time of the updates, and what they would have taken with equal shares."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.utils.wording import counted


class Gain:
    """Sum of the times of updates, measured and with equal shares.

    An update from one end of the sums to the next one takes d. Rank i is busy for t_i with its work w_i, and would be
    for t_i e_i / w_i with the work e_i of equal shares; the rest of the update would be the same:

        d + max_i (t_i e_i / w_i) - max_i t_i.

    Attributes:
        updates: number of updates.
        seconds: their measured time.
        equal_s: their time with equal shares.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.seconds = self.equal_s = 0.0
        self._ended_s: float | None = None

    def add(self, now_s: float, seconds: Sequence[float], work: Sequence[float], equal_work: Sequence[float]) -> None:
        """Add an update.

        Args:
            now_s: time at which its sums ended.
            seconds: t_i, seconds of each rank.
            work: w_i, samples of each rank or their cost.
            equal_work: e_i, the same with equal shares.
        """
        if self._ended_s is not None and all(seconds) and all(work):
            taken_s = now_s - self._ended_s
            equal_s = max(t * e / w for t, e, w in zip(seconds, equal_work, work, strict=True))
            self.updates += 1
            self.seconds += taken_s
            self.equal_s += taken_s + equal_s - max(seconds)
        self._ended_s = now_s

    def line(self) -> str:
        """Return the gain in one line; empty without updates."""
        if not self.updates:
            return ""
        ratio = self.equal_s / self.seconds
        return (
            f"paceline: {counted(self.updates, 'update')} in {clock(self.seconds)}; "
            f"with equal shares {clock(self.equal_s)} ({ratio:.2f} x)"
        )


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, or as hours, minutes and seconds.

    >>> clock(8.4), clock(500), clock(3750)
    ('0:08', '8:20', '1:02:30')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
