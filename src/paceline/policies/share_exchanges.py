"""Exchanges of the times of ranks: of how many updates at once."""

from __future__ import annotations

from collections.abc import Sequence

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
