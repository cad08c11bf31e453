"""Exchanges of the times of ranks: of how many updates at once, and when the ranks decide by them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.policies.shares import ShareBalancer, ShareDecision

LEAST_S = 0.1  # of the updates of an exchange
MOST_UPDATES = 32


def updates_at_once(seconds: Sequence[Sequence[float]]) -> int:
    """Return the number of updates whose times are exchanged next, so that an exchange costs little of them.

    Args:
        seconds: seconds of each rank in each update of the exchange before; 0 for a time that does not count.

    Example:
        >>> updates_at_once([[0.1, 0.2]])
        1
        >>> updates_at_once([[0.008, 0.01], [0.006, 0.01]])
        10
    """
    longest_s = max(map(max, seconds))
    return max(1, min(MOST_UPDATES, int(LEAST_S / longest_s))) if longest_s > 0 else 1


class ShareExchanges:
    """Policy of the shares as ranks follow it: by the times of an exchange, which has ended when the next update ends.

    Args:
        policy: policy of the shares.
        late: updates for which a device is given time before its times are read, >= 0.
    """

    def __init__(self, policy: ShareBalancer, late: int = 0) -> None:
        self._policy = policy
        self._late = late
        self._at_once = 1
        self._measured: list[tuple[Sequence[float], Sequence[float]]] = []  # of which the times are not exchanged yet
        self._exchanged: list[tuple[Sequence[float], Sequence[float]]] = []

    def end_update(self, samples: Sequence[float], seconds: Sequence[float]) -> ShareDecision | None:
        """End an update, and return what the ranks decide then.

        Args:
            samples: samples of each rank in the update, or their cost, >= 0.
            seconds: seconds of each rank for them; 0 for a time that does not count.
        """
        decision = None
        if self._exchanged:
            *before, latest = self._exchanged
            for each in before:
                self._policy.add(*each)
            decision = self._policy.decide(*latest)
            self._at_once = updates_at_once([times for _, times in self._exchanged])
            self._exchanged = []
        self._measured.append((samples, seconds))
        if len(self._measured) == self._at_once + self._late:
            self._exchanged, self._measured = self._measured[: self._at_once], self._measured[self._at_once :]
        return decision
