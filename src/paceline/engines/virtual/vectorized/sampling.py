"""Compute times of many workers at once: the same numbers that `RoundTrips` gives one by one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.clusters.simulated import TILE, Cluster
from paceline.clusters.timing import (
    Deterministic,
    Empirical,
    Exponential,
    Gamma,
    LogNormal,
    Pareto,
    ShiftedExponential,
    Uniform,
)
from paceline.utils.rng import stream
from paceline.utils.validation import check_range

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHIFT, LAST = TILE.bit_length() - 1, TILE - 1
# Tiles that are kept for 64 workers. They are seldom further apart, and if they are, it only costs time; tiles of all
# workers together are kept up to a number that takes 128 MiB, or the least for each.
LEAST_KEPT, MOST_KEPT, ALL_KEPT = 4, 32, 4096
# The quantile of one uniform does not depend on those beside it; other laws are asked row by row, as by `RoundTrips`.
ELEMENTWISE = (Deterministic, Empirical, Exponential, Gamma, LogNormal, Pareto, ShiftedExponential, Uniform)


class RoundTripSampler:
    """Round-trip times by (worker, draw), in tiles of 64 workers by 64 draws.

    Args:
        cluster: with laws, and without anything that makes times depend on the moment.
        seed: of the run.
        payload_bytes: of the parameters, and of a gradient.
    """

    def __init__(self, cluster: Cluster, seed: int, payload_bytes: float = 0) -> None:
        check_range("[0, inf)", payload_bytes=payload_bytes)
        self._cluster = cluster
        self._seed = seed
        self._network_s = cluster.network.pull_s(payload_bytes) + cluster.network.push_s(payload_bytes)
        groups = -(-cluster.n // TILE)
        self._kept = min(MOST_KEPT, max(LEAST_KEPT, ALL_KEPT // groups))
        self._tile_in = np.full(groups * self._kept, -1)  # which tile is kept in each place
        self._kept_s = np.empty((groups * self._kept * TILE, TILE))
        self._row_is_of = np.full(cluster.n, -1)  # the tile that a worker's row is from
        self._rows_s = np.empty((cluster.n, TILE))
        self._flat_s = self._rows_s.reshape(-1)

    def durations_s(self, workers: Ints, draws: Ints) -> Floats:
        """Return the round trips of these draws of different workers; draws count from 0."""
        tiles = draws >> SHIFT
        missing = (tiles != self._row_is_of.take(workers)).nonzero()[0]
        if len(missing):
            self._load(workers[missing], tiles[missing])
        found: Floats = self._flat_s.take((workers << SHIFT) + (draws & LAST))
        return found

    def block_s(self, tile: int) -> Floats:
        """Return the round trips of all workers at draws 64 * tile and the 63 after: array [draw, worker]."""
        n = self._cluster.n
        block_s = np.empty((TILE, n))
        for first in range(0, n, TILE):
            block_s[:, first : first + TILE] = self._times_s(first // TILE, tile).T
        return block_s

    def rows_s(self, workers: Ints, tiles: Ints) -> Floats:
        """Return the round trips of different workers at the draws of a tile each: array [worker, draw]."""
        groups = workers >> SHIFT
        places = groups * self._kept + tiles % self._kept
        missing = (self._tile_in[places] != tiles).nonzero()[0]
        rows_s: Floats = self._kept_s.take((places << SHIFT) + (workers & LAST), axis=0)
        if len(missing):
            missing = missing[np.lexsort((tiles[missing], groups[missing]))]
            group, tile = groups[missing], tiles[missing]
            changes = np.flatnonzero((group[1:] != group[:-1]) | (tile[1:] != tile[:-1])) + 1
            for begin, end in pairwise([0, *changes.tolist(), len(missing)]):
                those = missing[begin:end]
                rows_s[those] = self._tile(int(group[begin]), int(tile[begin]))[workers[those] & LAST]
        return rows_s

    def _load(self, workers: Ints, tiles: Ints) -> None:
        self._rows_s[workers] = self.rows_s(workers, tiles)
        self._row_is_of[workers] = tiles

    def _tile(self, group: int, tile: int) -> Floats:
        """Make a tile, and keep it for those of its workers that ask later."""
        place = group * self._kept + tile % self._kept
        times_s = self._times_s(group, tile)
        self._tile_in[place] = tile
        self._kept_s[place << SHIFT : (place << SHIFT) + len(times_s)] = times_s
        return times_s

    def _times_s(self, group: int, tile: int) -> Floats:
        """Return the round trips of 64 workers by 64 draws."""
        cluster, first = self._cluster, group * TILE
        u = stream(self._seed, "compute time", group, tile).random((TILE, TILE))[: cluster.n - first]
        if isinstance(cluster.timing, ELEMENTWISE):
            times_s = cluster.timing.quantile(u)
        else:
            laws: Any = (cluster.distribution_of(first + i) for i in range(len(u)))
            times_s = np.array([law.quantile(row) for law, row in zip(laws, u, strict=True)])
        speed = cluster.speed
        if speed != 1.0:
            times_s = times_s / (np.array(speed[first : first + TILE])[:, None] if isinstance(speed, tuple) else speed)
        return np.asarray(self._network_s + times_s if self._network_s else times_s)


def event_order(among: Ints, times_s: Floats, parents: Ints, sequence: Ints) -> Ints:
    """Return indices of arrivals in the order of (time, sequence number).

    Args:
        among: which arrivals; with any of them, its parent.
        times_s: of each arrival.
        parents: index of the worker's arrival before, at which this work was given; -1 if that was earlier.
        sequence: number of the work in the order in which it was given; looked at where there is no parent.

    >>> event_order(np.arange(3), np.array([2.0, 1.0, 2.0]), np.array([1, -1, -1]), np.array([0, 0, 1]))
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
