"""Ends a run when what its test waits for has happened, of which no number of updates makes sure."""

import signal
from collections import Counter

import paceline as pl
from paceline.core.records import GradientArrived, UpdateMade, WorkerJoined, WorkerLost

FOREVER = "updates=1000000"


class EndWhen(pl.Callback):
    """Interrupts the run, as a signal from outside does.

    Args:
        is_enough: given this callback, which has counted everything.

    Attributes:
        updates: made.
        used: gradients used, by worker.
        lost: workers, as often as they were.
        joined: likewise.
        used_since: as `used`, since the last worker was lost or has joined.
    """

    def __init__(self, is_enough):
        self._is_enough = is_enough
        self._has_ended = False
        self.updates = 0
        self.used, self.used_since = Counter(), Counter()
        self.lost, self.joined = [], []

    def on_record(self, record):
        super().on_record(record)
        self._count(record)
        if not self._has_ended and self._is_enough(self):
            self._has_ended = True
            signal.raise_signal(signal.SIGTERM)

    def on_end(self, end):
        self._has_ended = True  # signals are no longer handled

    def _count(self, record):
        match record:
            case UpdateMade():
                self.updates += 1
            case GradientArrived(used=True):
                self.used[record.worker] += 1
                self.used_since[record.worker] += 1
            case WorkerLost():
                self.lost.append(record.worker)
                self.used_since.clear()
            case WorkerJoined():
                self.joined.append(record.worker)
                self.used_since.clear()
