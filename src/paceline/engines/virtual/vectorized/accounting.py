"""What a timing simulation counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from paceline.engines.virtual.vectorized.sampling import Ints
from paceline.recording.history import Totals

Observer = Callable[[float, Ints], None]
"""Hears the time of each update, and the staleness of its gradients in the order of their arrival."""


class VectorizedAccounting:
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
