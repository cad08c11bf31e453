"""Slowness pattern of a cluster, from the times of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import Literal

from paceline.errors import UsageError

SlownessPattern = Literal["none", "half", "quarter", "rotating", "transient", "ladder"]

PERSISTENT = 1.2  # of the fastest worker's median, above which a worker is always slow
TRANSIENT = 1.6  # of a worker's own median, above which one of its times is slow
RARE = 0.01  # share of slow times below which they do not count
STREAK = 2.0  # slow times in a row, on average, from which slowness lasts


def slowness_pattern(times_s: Sequence[Sequence[float]]) -> SlownessPattern:
    """Return the pattern of slowness that is nearest to the times of some workers.

    - "half", "quarter": at most a fourth of the workers, or one, is always slow, and the slowest one has about this
      speed, less or more than 1 / sqrt(8).
    - "ladder": more workers are always slow.
    - "rotating": workers are slow now and then, for several gradients in a row.
    - "transient": single gradients are slow.
    - "none": none of these.

    A worker is always slow if its median exceeds that of the fastest worker by a fifth, and its first quartile the
    third one of that worker. A time is slow if it exceeds the median of its worker by 0.6.

    Args:
        times_s: times of each worker in seconds, > 0, in their order; computing, or round trips.

    Raises:
        UsageError: there is no worker, or a worker has no times.

    Example:
        >>> slowness_pattern([[1.0, 1.1, 0.9], [1.0, 1.0, 1.1], [2.1, 1.9, 2.0]])
        'half'
        >>> slowness_pattern([[1.0] * 19 + [5.0], [1.0] * 9 + [5.0] + [1.0] * 10])
        'transient'
    """
    if not times_s or not all(times_s):
        raise UsageError("slowness_pattern needs at least one worker, and at least one time of each")
    medians = [median(own) for own in times_s]
    fastest = min(medians)
    usual = min(_quartile(own, 3) for own, middle in zip(times_s, medians, strict=True) if middle == fastest)
    slow = [
        middle
        for own, middle in zip(times_s, medians, strict=True)
        if middle > PERSISTENT * fastest and _quartile(own, 1) > usual
    ]
    if len(slow) > max(1, len(medians) // 4):
        return "ladder"
    if slow:
        return "half" if max(slow) < sqrt(8) * fastest else "quarter"
    is_slow = [[time > TRANSIENT * middle for time in own] for own, middle in zip(times_s, medians, strict=True)]
    count = sum(map(sum, is_slow))
    if count < RARE * sum(map(len, times_s)):
        return "none"
    streaks = sum(now and not before for own in is_slow for before, now in zip([False, *own], own, strict=False))
    return "rotating" if count >= STREAK * streaks else "transient"


def _quartile(values: Sequence[float], which: Literal[1, 3]) -> float:
    return sorted(values)[which * len(values) // 4]
