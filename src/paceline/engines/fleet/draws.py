"""Compute times of many workers at once: the same numbers that `RoundTrips` gives one by one."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.cluster import RECENT_TILES, TILE, Cluster
from paceline.streams import stream
from paceline.timing import (
    Deterministic,
    Empirical,
    Exponential,
    Gamma,
    LogNormal,
    Pareto,
    ShiftedExponential,
    Uniform,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHIFT, LAST = TILE.bit_length() - 1, TILE - 1
# The quantile of one uniform does not depend on those beside it; other laws are asked row by row, as by `RoundTrips`.
ELEMENTWISE = (Deterministic, Empirical, Exponential, Gamma, LogNormal, Pareto, ShiftedExponential, Uniform)


class Draws:
    """Round-trip times by (worker, draw), the 64 draws around its latest one kept for each worker.

    Args:
        cluster: with laws, and without anything that makes times depend on the moment.
        seed: of the run.
        payload_bytes: of the parameters, and of a gradient.
    """

    def __init__(self, cluster: Cluster, seed: int, payload_bytes: float = 0) -> None:
        self._cluster = cluster
        self._seed = seed
        self._network_s = cluster.network.pull_s(payload_bytes) + cluster.network.push_s(payload_bytes)
        groups = -(-cluster.n // TILE)
        self._tile_of = np.full(cluster.n, -1)  # which of its draws a worker's row holds
        self._rows = np.empty((cluster.n, TILE))
        self._flat = self._rows.reshape(-1)
        self._tile_s = lru_cache(RECENT_TILES * groups)(self._times_s)

    def durations_s(self, workers: Ints, draws: Ints) -> Floats:
        """Return the round trips of these draws of different workers; draws count from 0."""
        tiles = draws >> SHIFT
        missing = tiles != self._tile_of.take(workers)
        if missing.any():
            self._load(workers[missing], tiles[missing])
        found: Floats = self._flat.take((workers << SHIFT) + (draws & LAST))
        return found

    def block_s(self, tile: int) -> Floats:
        """Return the round trips of all workers at draws 64 * tile and the 63 after: array [draw, worker]."""
        n = self._cluster.n
        block_s = np.empty((TILE, n))
        for first in range(0, n, TILE):
            block_s[:, first : first + TILE] = self._times_s(first // TILE, tile).T
        return block_s

    def _load(self, workers: Ints, tiles: Ints) -> None:
        """Make the rows of these workers those of these tiles."""
        order = np.lexsort((workers, tiles, workers >> SHIFT))
        workers, tiles = workers[order], tiles[order]
        groups = workers >> SHIFT
        changes = np.flatnonzero((groups[1:] != groups[:-1]) | (tiles[1:] != tiles[:-1])) + 1
        for begin, end in pairwise([0, *changes.tolist(), len(workers)]):
            those = workers[begin:end]
            self._rows[those] = self._tile_s(int(groups[begin]), int(tiles[begin]))[those & LAST]
        self._tile_of[workers] = tiles

    def _times_s(self, group: int, tile: int) -> Floats:
        """Return the round trips of 64 workers by 64 draws."""
        cluster, first = self._cluster, group * TILE
        u = stream(self._seed, "compute time", group, tile).random((TILE, TILE))[: cluster.n - first]
        if isinstance(cluster.timing, ELEMENTWISE):
            times_s = cluster.timing.quantile(u)
        else:
            laws: Any = (cluster.law_of(first + i) for i in range(len(u)))
            times_s = np.array([law.quantile(row) for law, row in zip(laws, u, strict=True)])
        speeds = [cluster.speed_of(first + i) for i in range(len(u))] if isinstance(cluster.speed, tuple) else []
        times_s = times_s / (np.array(speeds)[:, None] if speeds else cluster.speed)
        return np.asarray(self._network_s + times_s)
