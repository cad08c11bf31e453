"""The order of arrivals: by time, and those at the same time by when their work was given."""

from __future__ import annotations

import numpy as np

from paceline.engines.fleet.draws import Floats, Ints


def in_order(among: Ints, times_s: Floats, parents: Ints, sequence: Ints) -> Ints:
    """Return indices of arrivals in the order of (time, sequence number).

    Args:
        among: which arrivals; with any of them, its parent.
        times_s: of each arrival.
        parents: index of the worker's arrival before, at which this work was given; -1 if that was earlier.
        sequence: number of the work in the order in which it was given; looked at where there is no parent.

    >>> in_order(np.arange(3), np.array([2.0, 1.0, 2.0]), np.array([1, -1, -1]), np.array([0, 0, 1]))
    array([1, 2, 0])
    """
    found_s = times_s[among]
    order = np.argsort(found_s)
    sorted_s = found_s[order]
    if (sorted_s[1:] == sorted_s[:-1]).any():
        order = np.argsort(_ranks(times_s, parents, sequence)[among])
    return among[order]


def _ranks(times_s: Floats, parents: Ints, sequence: Ints) -> Ints:
    """Return the rank of each arrival, however many are at the same time.

    Work given at an arrival has a larger number than all work given before, and numbers of such work are in the
    order of those arrivals. So an arrival is placed by its time, its parent's time, the time of the parent of
    that one and so on: compared by doubling the length of these lists, as the suffixes of a text are sorted.
    """
    roots = np.flatnonzero(parents < 0)
    count = len(roots)
    # In front stand nodes for work given earlier, the parents of the roots, in the order of that work.
    up = np.concatenate([np.arange(count), parents + count])
    up[count + roots[np.argsort(sequence[roots])]] = np.arange(count)
    ranks = np.concatenate([np.arange(count), count + np.unique(times_s, return_inverse=True)[1]])
    distinct = 0
    while distinct < len(ranks):
        values, ranks = np.unique(ranks * len(ranks) + ranks[up], return_inverse=True)
        distinct = len(values)
        up = up[up]
    return ranks[count:]
