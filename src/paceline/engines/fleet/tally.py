"""What a timing simulation counts, and whether the coordinator would have lost patience with a worker meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from paceline.engines.fleet.draws import Floats, Ints
from paceline.history import Totals
from paceline.patience import LEAST_S, ROUND_TRIPS

Observer = Callable[[float, Ints], None]
"""Hears the time of each update, and the staleness of its gradients in the order of their arrival."""


class Tally:
    """Counts of a simulation of n workers.

    Attributes:
        now: seconds of the server's clock, the update included.
        pulls: pieces of work that were given.
        pushes: gradients that arrived.
        idle_s: worker-seconds without work.
        wasted_s: worker-seconds of work that was dropped or interrupted.
    """

    def __init__(self, workers: int) -> None:
        self.now = 0.0
        self.updates = 0
        self.pulls = 0
        self.pushes = 0
        self.interrupted = 0
        self.idle_s = 0.0
        self.wasted_s = 0.0
        self._workers = workers
        self._staleness = np.zeros(1, np.int64)

    def use(self, staleness: Ints) -> None:
        """Count gradients that updates were made of."""
        counts = np.bincount(staleness, minlength=len(self._staleness))
        counts[: len(self._staleness)] += self._staleness
        self._staleness = counts

    def totals(self) -> Totals:
        """Return the counts as a run's; a sample stands for a gradient."""
        used = int(self._staleness.sum())
        dropped = self.pushes - used
        worker_s = self._workers * self.now
        found = np.flatnonzero(self._staleness)
        return Totals(
            updates=self.updates,
            used=used,
            applied=used,
            dropped=dropped,
            interrupted=self.interrupted,
            samples_used=used,
            samples_dropped=dropped + self.interrupted,
            staleness=Counter(dict(zip(found.tolist(), self._staleness[found].tolist(), strict=True))),
            idle_share=self.idle_s / worker_s if worker_s else 0.0,
        )


class Silence:
    """Whether any worker is at work for so long that it could be declared lost; see `paceline.patience`.

    The coordinator looks at certain moments only; here every moment counts, so that a fleet gives up sooner than
    the coordinator does, and never later.

    Args:
        slack_s: by which work is given earlier, as the coordinator sees it, than it begins.
    """

    def __init__(self, slack_s: float) -> None:
        self._slack_s = slack_s
        self._longest_s = 0.0

    def is_too_long(self, until_s: float, ended_s: Floats, begun_s: Floats, oldest_s: float) -> bool:
        """Take in a stretch of time; return whether some work may have been given up in it.

        Args:
            until_s: its end.
            ended_s: when work ended in it, ascending, at least one.
            begun_s: when that work began.
            oldest_s: when the oldest work began that goes on at its end; inf for none.
        """
        trips_s = ended_s - begun_s
        known_s = self._longest_s or float(trips_s[0])
        self._longest_s = max(self._longest_s, float(trips_s.max()))
        if until_s - min(oldest_s, begun_s.min()) + self._slack_s < _timeout_s(known_s):
            return False
        if until_s - oldest_s + self._slack_s >= _timeout_s(self._longest_s):
            return True
        # A closer look, at the moment of every arrival.
        longest_s = np.maximum.accumulate(np.append(known_s, trips_s))[:-1]
        at_work_s = np.minimum.accumulate(np.append(begun_s, oldest_s)[::-1])[:0:-1]
        waited_s = ended_s - at_work_s + self._slack_s
        return bool((waited_s >= np.maximum(ROUND_TRIPS * longest_s, LEAST_S)).any())


def _timeout_s(longest_s: float) -> float:
    return max(ROUND_TRIPS * longest_s, LEAST_S)
