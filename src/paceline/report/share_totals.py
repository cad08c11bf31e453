"""What unequal shares have gained in a run, and for how long each rank computed and waited."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from paceline.core.records import GradientArrived, Record, WorkInterrupted
from paceline.recording.run_folder import SavedRun
from paceline.recording.timed_updates import TimedUpdate, TimedUpdates
from paceline.report.mean_grid import HeatMap, MeanGrid
from paceline.shares.gain import Gain

MOST_KEPT = 3 * 4096  # numbers before they are added to the grid


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
        self._leases = self._repeated = 0
        self._dealt = array("d")  # rank, time and samples of each share that is not in the grid yet
        self._samples = MeanGrid()

    def add(self, record: Record) -> None:
        """Add a record."""
        match record:
            case GradientArrived(used=True):
                self._leases += 1
            case WorkInterrupted() | GradientArrived(crossed_interrupt=True):
                self._repeated += 1
        update = self._updates.add(record)
        if update is None:
            return
        self.latest = update
        self.gain.add(update)
        for rank, samples in zip(update.ranks, update.samples, strict=True):
            self._dealt.extend((rank, update.ended_s, samples))
        if len(self._dealt) > MOST_KEPT:
            self._fill_grid()
        for rank, seconds, waiting_s in zip(update.ranks, update.seconds, update.waiting_s, strict=True):
            self._computing_s[rank] += seconds
            self._waiting_s[rank] += waiting_s
            self._present_s[rank] += update.ended_s - update.began_s

    @property
    def waiting_s(self) -> Mapping[int, float]:
        """Seconds for which each rank waited for the slowest one."""
        return dict(sorted(self._waiting_s.items()))

    def share_map(self, ranks: int) -> HeatMap:
        """Return the mean number of samples of each rank in an update, over time."""
        self._fill_grid()
        return self._samples.heat_map(ranks)

    def _fill_grid(self) -> None:
        rank, ended_s, samples = np.array(self._dealt).reshape(-1, 3).T
        self._samples.add(rank.astype(int), ended_s, samples)
        del self._dealt[:]

    @property
    def queue(self) -> str:
        """Sentence on the leases of a queue and on the ends of updates; empty while each share was one lease."""
        shares = self.gain.updates * len(self._waiting_s)
        if self._leases <= shares and not self._repeated:
            return ""
        waited = sum(self._waiting_s.values()) / (sum(self._present_s.values()) or 1.0)
        repeated = self._repeated / (self._leases or 1)
        return (
            f"{self._leases / (shares or 1):.1f} leases of a rank in an update, of which other ranks repeated "
            f"{repeated:.1%}; waiting for the end of the queue took {waited:.1%} of the time"
        )

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
