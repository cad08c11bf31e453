"""Lockstep simulation: all workers start anew at every update, and late ones are interrupted."""

from __future__ import annotations

import numpy as np

from paceline.clusters.simulated import TILE, Cluster
from paceline.engines.virtual.vectorized.accounting import Observer, VectorizedAccounting
from paceline.engines.virtual.vectorized.sampling import RoundTripSampler
from paceline.protocols.protocol import Protocol


class Lockstep:
    """Simulation of synchronous rounds: an update takes the k-th smallest of n round trips.

    ``round = min over sets of k workers of the max of their round trips``. Rounding keeps that order, so the end of a
    round is bit-identical to that of its k-th round trip.

    Args:
        protocol: protocol that gives every worker a new task with every update.
        cluster: cluster with times independent of the virtual time, and no server time per gradient.
        seed: seed of the run, >= 0.
        payload_bytes: bytes of the parameters, and of a gradient, >= 0.
    """

    def __init__(self, protocol: Protocol, cluster: Cluster, seed: int, payload_bytes: float = 0) -> None:
        self.accounting = VectorizedAccounting(cluster.n)
        self._n = cluster.n
        self._quorum = cluster.n if protocol.quorum == "all" else protocol.quorum
        self._update_s = cluster.server.update_s
        self._sampler = RoundTripSampler(cluster, seed, payload_bytes)

    @staticmethod
    def takes(protocol: Protocol, cluster: Cluster) -> bool:
        """Return whether every worker starts anew with every update."""
        is_full = protocol.quorum in ("all", cluster.n)
        is_fresh = protocol.max_staleness == 0 and protocol.on_update == "interrupt"
        return protocol.refill == "update" and (is_full or is_fresh)

    def run(self, updates: int, observe: Observer | None = None) -> None:
        """Simulate this number of updates."""
        accounting, k, late = self.accounting, self._quorum, self._n - self._quorum
        fresh = np.zeros(k, np.int64)
        for update in range(updates):
            if update % TILE == 0:
                block_s = self._sampler.block_s(update // TILE)
            start_s = accounting.now
            trips_s = block_s[update % TILE]
            trips_s.partition(k - 1)
            trips_s = trips_s[:k]
            round_s = float(trips_s[-1])
            closed_s = start_s + round_s
            accounting.now = closed_s + self._update_s
            accounting.idle_s += k * (accounting.now - start_s) - float(trips_s.sum())
            if update + 1 < updates:  # the run ends with the last update, which interrupts none
                accounting.wasted_s += late * (accounting.now - start_s)
            if observe is not None:
                observe(accounting.now, fresh)
        accounting.updates = updates
        accounting.pulls = updates * self._n
        accounting.pushes = updates * k
        accounting.interrupted = (updates - 1) * late
        accounting.use_fresh(updates * k)
