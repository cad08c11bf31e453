"""Vectorized sampling of round-trip times: the same numbers as `RoundTrips`, for many workers at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.clusters.simulated import TILE, Cluster
from paceline.clusters.timing.distributions import ELEMENTWISE
from paceline.utils.rng import stream
from paceline.utils.validation import check_range

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHIFT, LAST = TILE.bit_length() - 1, TILE - 1
# Cached tiles per group of 64 workers, and in total (128 MiB). Workers are seldom further apart; if they are, tiles are
# computed again.
MIN_CACHED, MAX_CACHED, MAX_CACHED_TOTAL = 4, 32, 4096


class RoundTripSampler:
    """Sampler of round-trip times by (worker, draw), in tiles of 64 workers by 64 draws.

    Args:
        cluster: cluster with distributions, and with times independent of the virtual time.
        seed: seed of the run, >= 0.
        payload_bytes: bytes of the parameters, and of a gradient, >= 0.
    """

    def __init__(self, cluster: Cluster, seed: int, payload_bytes: float = 0) -> None:
        check_range("[0, inf)", payload_bytes=payload_bytes)
        self._cluster = cluster
        self._seed = seed
        self._network_s = cluster.network.pull_s(payload_bytes) + cluster.network.push_s(payload_bytes)
        groups = -(-cluster.n // TILE)
        self._cached = min(MAX_CACHED, max(MIN_CACHED, MAX_CACHED_TOTAL // groups))
        self._cached_tile = np.full(groups * self._cached, -1)  # tile in each slot of the cache
        self._cache_s = np.empty((groups * self._cached * TILE, TILE))
        self._row_is_of = np.full(cluster.n, -1)  # tile of each worker's row
        self._rows_s = np.empty((cluster.n, TILE))
        self._flat_s = self._rows_s.reshape(-1)

    def durations_s(self, workers: Ints, draws: Ints) -> Floats:
        """Return the round trips of these draws of distinct workers; draws count from 0."""
        tiles = draws >> SHIFT
        missing = (tiles != self._row_is_of.take(workers)).nonzero()[0]
        if len(missing):
            self._load(workers[missing], tiles[missing])
        found: Floats = self._flat_s.take((workers << SHIFT) + (draws & LAST))
        return found

    def block_s(self, tile: int) -> Floats:
        """Return the round trips of all workers at the 64 draws from 64 * tile: array [draw, worker]."""
        n = self._cluster.n
        block_s = np.empty((TILE, n))
        for first in range(0, n, TILE):
            block_s[:, first : first + TILE] = self._times_s(first // TILE, tile).T
        return block_s

    def rows_s(self, workers: Ints, tiles: Ints) -> Floats:
        """Return the round trips of distinct workers at the draws of one tile each: array [worker, draw]."""
        groups = workers >> SHIFT
        slots = groups * self._cached + tiles % self._cached
        missing = (self._cached_tile[slots] != tiles).nonzero()[0]
        rows_s: Floats = self._cache_s.take((slots << SHIFT) + (workers & LAST), axis=0)
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
        """Compute a tile and cache it for its other workers."""
        slot = group * self._cached + tile % self._cached
        times_s = self._times_s(group, tile)
        self._cached_tile[slot] = tile
        self._cache_s[slot << SHIFT : (slot << SHIFT) + len(times_s)] = times_s
        return times_s

    def _times_s(self, group: int, tile: int) -> Floats:
        """Return the round trips of a tile."""
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
        among: indices of the arrivals to sort; parents of arrivals in it are in it too.
        times_s: virtual second of each arrival.
        parents: index of the worker's previous arrival, at which it received this task; -1 if that was earlier.
        sequence: sequence number of the task; used for arrivals without a parent.

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
    """Return the rank of each arrival, with ties resolved.

    A task received at an arrival has a larger number than all earlier tasks, and such numbers are in the order of
    those arrivals. So an arrival is ranked by its time, its parent's time, the time of that one's parent and so on.
    These lists are compared by prefix doubling, as in the sorting of suffixes.
    """
    roots = np.flatnonzero(parents < 0)
    count = len(roots)
    # The first nodes stand for earlier tasks, the parents of the roots, in the order of those tasks.
    up = np.concatenate([np.arange(count), parents + count])
    up[count + roots[np.argsort(sequence[roots])]] = np.arange(count)
    ranks = np.concatenate([np.arange(count), count + np.unique(times_s, return_inverse=True)[1]])
    distinct = 0
    while distinct < len(ranks):
        values, ranks = np.unique(ranks * len(ranks) + ranks[up], return_inverse=True)
        distinct = len(values)
        up = up[up]
    return ranks[count:]
