"""What a timing simulation counts, and whether the coordinator would have lost patience with a worker meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

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

    def use_fresh(self, gradients: int) -> None:
        """Count gradients without staleness."""
        self._staleness[0] += gradients

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

    The coordinator looks at certain moments only; here every moment counts. So a fleet may give up where the
    coordinator goes on, and never the other way round.

    Args:
        slack_s: by which work is given earlier, as the coordinator sees it, than it begins.

    Attributes:
        longest_s: round trip that ended so far.
    """

    def __init__(self, slack_s: float) -> None:
        self._slack_s = slack_s
        self.longest_s = 0.0

    def is_short(self, until_s: float, oldest_s: float) -> bool:
        """Return whether nobody can be lost until then, if no work at hand began before the oldest."""
        return self.longest_s > 0 and until_s - oldest_s + self._slack_s < _timeout_s(self.longest_s)

    def is_too_long(self, until_s: float, ended_s: Floats, begun_s: Floats, oldest_s: float) -> bool:
        """Take in a stretch of time; return whether some work may have been given up in it.

        Args:
            until_s: its end.
            ended_s: when work ended in it, in any order.
            begun_s: when that work began.
            oldest_s: when the oldest work began that goes on at its end; inf for none.
        """
        trips_s = ended_s - begun_s
        oldest_of_all_s = min(oldest_s, begun_s.min(initial=inf))
        if self.is_short(until_s, oldest_of_all_s):
            self.longest_s = max(self.longest_s, trips_s.max(initial=0.0))
            return False
        order = np.argsort(ended_s)
        longest_s = np.maximum.accumulate(np.append(self.longest_s, trips_s[order]))
        at_work_s = np.minimum.accumulate(np.append(begun_s[order], oldest_s)[::-1])[::-1]
        waited_s = np.append(ended_s[order], until_s) - at_work_s + self._slack_s
        self.longest_s = float(longest_s[-1])
        # Before the first arrival of all there is no timeout.
        return bool((waited_s >= np.where(longest_s > 0, _timeout_s(longest_s), inf)).any())


def _timeout_s(longest_s: Any) -> Any:
    return np.maximum(ROUND_TRIPS * longest_s, LEAST_S)
