"""What unequal shares have gained in a run, and for how long each rank computed and waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from paceline.core.records import Record
from paceline.recording.run_folder import SavedRun
from paceline.recording.timed_updates import TimedUpdate, TimedUpdates
from paceline.shares.gain import Gain


def has_shares(run: SavedRun) -> bool:
    """Return whether the workers of a run share the samples of each update by their speed."""
    return str(run.configuration.get("protocol", "")).startswith("balanced(")


class ShareTotals:
    """Sums over the updates of a run whose workers share the samples.

    Attributes:
        gain: what the shares have gained.
        latest: latest update; None before the first.
    """

    def __init__(self) -> None:
        self.gain = Gain()
        self.latest: TimedUpdate | None = None
        self._updates = TimedUpdates()
        self._computing_s: defaultdict[int, float] = defaultdict(float)
        self._waiting_s: defaultdict[int, float] = defaultdict(float)
        self._present_s: defaultdict[int, float] = defaultdict(float)

    def add(self, record: Record) -> None:
        """Add a record."""
        update = self._updates.add(record)
        if update is None:
            return
        self.latest = update
        self.gain.add(update)
        for rank, seconds, waiting_s in zip(update.ranks, update.seconds, update.waiting_s, strict=True):
            self._computing_s[rank] += seconds
            self._waiting_s[rank] += waiting_s
            self._present_s[rank] += update.ended_s - update.began_s

    @property
    def waiting_s(self) -> Mapping[int, float]:
        """Seconds for which each rank waited for the slowest one."""
        return dict(sorted(self._waiting_s.items()))

    def cells(self, rank: int) -> tuple[str, str]:
        """Return the samples of a rank in the latest update, and for how long it has waited; empty where unknown."""
        latest = dict(zip(self.latest.ranks, self.latest.samples, strict=True)) if self.latest is not None else {}
        waited_s = self._waiting_s.get(rank)
        return str(latest.get(rank, "")), f"{waited_s:.3g} s" if waited_s is not None else ""

    def activities(self) -> dict[int, dict[str, float]]:
        """Return the seconds of each rank by activity, without what lies between updates."""
        return {
            rank: {
                "computing": self._computing_s[rank],
                "communicating": max(0.0, self._present_s[rank] - self._computing_s[rank] - waiting_s),
                "waiting": waiting_s,
            }
            for rank, waiting_s in self.waiting_s.items()
        }
