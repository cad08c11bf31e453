"""Exact seconds per update with backup workers that finish stale work, for exponential round trips."""

import numpy as np
from numpy.typing import NDArray


def finish_and_idle(k: int, n: int) -> float:
    """Return the expected time of an update of backup workers with Push & Wait, in mean round trips.

    After an update, k workers start on the new version and n - k still compute a stale gradient. With a accepted
    gradients and s workers on stale work, n - a workers compute. With probability s / (n - a) the next one to finish is
    a stale one, which starts on the new version. Otherwise its gradient is accepted:

    ``V(s, a) = (1 + s V(s-1, a) + (n-a-s) V(s, a+1)) / (n - a)``, ``V(s, k) = 0``; the result is V(n-k, 0).

    Args:
        k: number of gradients of an update, 1 to n.
        n: number of workers, >= 1.

    >>> finish_and_idle(k=1, n=2)  # (1 + V(0, 0)) / 2 with V(0, 0) = 1 / 2
    0.75

    Source: paceline; the protocol is that of Xu et al., "Dynamic Backup Workers", 2020, Sect. 2.
    """
    return _first_passage(n - np.arange(k), stale=n - k)


def finish_and_continue(k: int, n: int) -> float:
    """Return the expected time of an update of backup workers with Pull, in mean round trips.

    After an update, the worker of the last gradient starts on the new version, and n - 1 workers still compute a stale
    gradient. All n workers compute all the time, each on the new version after its first gradient:

    ``V(s, a) = (1 + s V(s-1, a) + (n-s) V(s, a+1)) / n``, ``V(s, k) = 0``; the result is V(n-1, 0).

    Args:
        k: number of gradients of an update, >= 1.
        n: number of workers, >= 1.

    >>> finish_and_continue(k=1, n=2)
    0.75

    Source: paceline; the protocol is that of Xu et al., "Dynamic Backup Workers", 2020, Sect. 2.
    """
    return _first_passage(np.full(k, n), stale=n - 1)


def _first_passage(computing: NDArray[np.int_], stale: int) -> float:
    """Return V(stale, 0), the expected time until all gradients of an update are accepted.

    The recursion processes all pairs of s and a with the same sum of s and k - a together, because V(s, a) depends only
    on pairs with a smaller sum.

    Args:
        computing: number of computing workers with a accepted gradients, for a = 0, ..., k - 1.
        stale: number of workers on stale work when the update opens, >= 0.
    """
    k = len(computing)
    times = np.zeros(k + 1)
    for total in range(1, stale + k + 1):
        s = total - k + np.arange(k)
        following = (1 + s * times[:-1] + (computing - s) * times[1:]) / computing
        times[:-1] = np.where((s >= 0) & (s <= stale), following, 0)
    return float(times[0])
