"""Schedule of evaluations."""

from __future__ import annotations

from paceline.core.duration import Duration
from paceline.utils.state_dict import Stateful


class EvaluationSchedule(Stateful):
    """Selects the updates that are evaluated: the first one at or after every multiple of a duration.

    No evaluation begins while another one runs.

    Args:
        every: updates, gradients or seconds between two evaluations.

    Attributes:
        is_running: whether an evaluation is running.

    Example:
        >>> evaluations = EvaluationSchedule(Duration("updates", 10))
        >>> [v for v in range(1, 31) if evaluations.is_due(v, workload=v, now=0.0) and evaluations.end() is None]
        [10, 20, 30]
    """

    _saved = ("is_running", "_at")

    def __init__(self, every: Duration) -> None:
        self.is_running = False
        self._every = every
        self._at = 0.0

    def is_due(self, version: int, workload: int, now: float) -> bool:
        """Return whether this version must be evaluated; if so, its evaluation counts as running."""
        if self.is_running:
            return False
        reached = self._every.position(version, workload, now)
        if reached - self._at < self._every.amount:
            return False
        self._at = self._every.amount * (reached // self._every.amount)
        self.is_running = True
        return True

    def end(self) -> None:
        """Note that the evaluation has ended."""
        self.is_running = False
