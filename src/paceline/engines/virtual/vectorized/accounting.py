"""Counts of a vectorized timing simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from paceline.engines.virtual.vectorized.sampling import Ints
from paceline.recording.history import Totals

Observer = Callable[[float, Ints], None]
"""Callback with the time of each update, and the staleness of its gradients in the order of their arrival."""


class VectorizedAccounting:
    """Counts of a simulation.

    Args:
        workers: number of workers, >= 1.

    Attributes:
        now: virtual seconds at the end of the latest update.
        updates: number of updates.
        pulls: number of tasks.
        pushes: number of arrivals.
        interrupted: number of interrupted tasks.
        idle_s: worker-seconds without a task.
        wasted_s: worker-seconds of dropped and interrupted tasks.
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
        """Count used gradients by their staleness."""
        counts = np.bincount(staleness, minlength=len(self._staleness))
        counts[: len(self._staleness)] += self._staleness
        self._staleness = counts

    def use_fresh(self, gradients: int) -> None:
        """Count used gradients of staleness 0."""
        self._staleness[0] += gradients

    def totals(self) -> Totals:
        """Return the totals, with one sample per gradient."""
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
