"""Gain by unequal shares: the time of the updates, and what they would have taken with equal shares."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.utils.wording import counted


class Gain:
    """Sum of the times of updates, measured and with equal shares.

    An update from one end of the sums to the next one takes d. With shares s_i the slowest rank is busy for max_i t_i;
    with equal shares of B samples it would be for max_i t_i B / s_i, and the rest of the update would be the same:

        d + max_i (t_i B / s_i) - max_i t_i.

    Attributes:
        updates: number of updates.
        seconds: their measured time.
        equal_s: their time with equal shares.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.seconds = self.equal_s = 0.0
        self._ended_s: float | None = None

    def add(self, now_s: float, seconds: Sequence[float], samples: Sequence[int], equal: int) -> None:
        """Add an update.

        Args:
            now_s: time at which its sums ended.
            seconds: t_i, seconds of each rank.
            samples: s_i, samples of each rank.
            equal: B, samples of a rank with equal shares.
        """
        if self._ended_s is not None and all(seconds) and all(samples):
            taken_s = now_s - self._ended_s
            equal_s = max(busy * equal / count for busy, count in zip(seconds, samples, strict=True))
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
