"""End of a run at a condition that no number of updates guarantees."""

import signal
from collections import Counter

import paceline as pl
from paceline.core.records import GradientArrived, UpdateMade, WorkerJoined, WorkerLost

FOREVER = "updates=1000000"


class EndWhen(pl.callbacks.Callback):
    """Callback that interrupts the run when a condition holds, as a signal does.

    Args:
        is_enough: condition, a function of this callback with its counts.

    Attributes:
        updates: number of updates made.
        used: number of gradients used, by worker.
        lost: lost workers, in order, with repetitions.
        joined: workers that joined, in order, with repetitions.
        used_since: as `used`, since the last worker was lost or joined.
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
