"""Who may start when nobody may get too far ahead of the slowest."""

from collections import Counter
from collections.abc import Mapping
from typing import Any


class SSPBound:
    """Deliveries of the live workers since the phase began, under a bound on the lead.

    Args:
        bound: deliveries that a worker may be ahead of the live worker that has delivered fewest, when it starts.

    Example:
        >>> lead = SSPBound(bound=0)
        >>> lead.join(0); lead.join(1)
        >>> lead.deliver(0)
        False
        >>> lead.may_start(0)
        False
        >>> lead.deliver(1)  # the minimum rose: somebody may be released
        True
        >>> lead.may_start(0)
        True
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._delivered: dict[int, int] = {}
        self._workers_at: Counter[int] = Counter()
        self._minimum = 0

    def join(self, worker: int) -> None:
        """Let a worker take part; it starts at the minimum."""
        self._delivered[worker] = self._minimum
        self._workers_at[self._minimum] += 1

    def leave(self, worker: int) -> bool:
        """Take a worker out, if it takes part; return whether the minimum rose."""
        count = self._delivered.pop(worker, None)
        return count is not None and self._move(count, None)

    def deliver(self, worker: int) -> bool:
        """Count a delivery, accepted or not; return whether the minimum rose."""
        if worker not in self._delivered:
            self.join(worker)
        count = self._delivered[worker]
        self._delivered[worker] = count + 1
        return self._move(count, count + 1)

    def may_start(self, worker: int) -> bool:
        """Return whether the worker is within the bound."""
        return self._delivered.get(worker, self._minimum) - self._minimum <= self._bound

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the bound."""
        return {"delivered": dict(self._delivered), "minimum": self._minimum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
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
