"""Stale-synchronous bound on how far a worker may be ahead of the slowest one."""

from collections import Counter
from collections.abc import Mapping
from typing import Any


class SSPBound:
    """Stale-synchronous bound: limits how many gradients a worker may be ahead of the slowest one.

    Args:
        bound: largest number of gradients, >= 0, by which a worker may be ahead of the slowest live worker when it
            starts; may change.

    Example:
        >>> ssp = SSPBound(bound=0)
        >>> ssp.join(0); ssp.join(1)
        >>> ssp.deliver(0)
        False
        >>> ssp.may_start(0)
        False
        >>> ssp.deliver(1)  # the minimum rose: worker 0 may start
        True
        >>> ssp.may_start(0)
        True
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self._delivered: dict[int, int] = {}
        self._workers_at: Counter[int] = Counter()
        self._minimum = 0

    def join(self, worker: int) -> None:
        """Add a worker; it starts at the minimum."""
        self._delivered[worker] = self._minimum
        self._workers_at[self._minimum] += 1

    def leave(self, worker: int) -> bool:
        """Remove a worker, if it is present; return whether the minimum rose."""
        count = self._delivered.pop(worker, None)
        return count is not None and self._move(count, None)

    def deliver(self, worker: int) -> bool:
        """Count a delivered gradient, accepted or not; return whether the minimum rose."""
        if worker not in self._delivered:
            self.join(worker)
        count = self._delivered[worker]
        self._delivered[worker] = count + 1
        return self._move(count, count + 1)

    @property
    def leads(self) -> dict[int, int]:
        """Gradients by which each worker is ahead of the slowest."""
        return {worker: count - self._minimum for worker, count in self._delivered.items()}

    def may_start(self, worker: int) -> bool:
        """Return whether the worker may start."""
        return self._delivered.get(worker, self._minimum) - self._minimum <= self.bound

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"delivered": dict(self._delivered), "minimum": self._minimum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load such a state."""
        self._delivered = dict(state["delivered"])
        self._workers_at = Counter(self._delivered.values())
        self._minimum = state["minimum"]

    def _move(self, old: int, new: int | None) -> bool:
        if new is not None:
            self._workers_at[new] += 1
        self._workers_at[old] -= 1
        if self._workers_at[old]:
            return False
        del self._workers_at[old]
        if old != self._minimum or not self._workers_at:
            return False
        self._minimum = min(self._workers_at)
        return True
