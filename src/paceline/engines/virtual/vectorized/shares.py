"""Simulation of synchronous rounds in which the shares of the workers follow their speeds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.clusters.simulated import TILE, Cluster
from paceline.clusters.timing.network import Network
from paceline.engines.virtual.vectorized.accounting import Observer, VectorizedAccounting
from paceline.engines.virtual.vectorized.sampling import RoundTripSampler
from paceline.policies.controllers.balance import Balance, ShareState


class SharedRounds:
    """Simulation of rounds whose shares are decided from the times before: an update takes the longest round trip.

    Args:
        balance: controller of the shares.
        cluster: cluster with times independent of the virtual time, and no server time per gradient.
        seed: seed of the run, >= 0.
        payload_bytes: bytes of the parameters, and of a gradient, >= 0.
    """

    def __init__(self, balance: Balance, cluster: Cluster, seed: int, payload_bytes: float = 0) -> None:
        self.accounting = VectorizedAccounting(cluster.n)
        self._n = cluster.n
        self._balance = balance
        self._update_s = cluster.server.update_s
        self._lease_s = cluster.leases.cost_s
        self._network_s = cluster.network.pull_s(payload_bytes) + cluster.network.push_s(payload_bytes)
        self._sampler = RoundTripSampler(replace(cluster, network=Network()), seed)  # of compute times alone

    def run(self, updates: int, observe: Observer | None = None) -> None:
        """Simulate this number of updates."""
        accounting, n, size = self.accounting, self._n, self._balance.pieces
        fresh = np.zeros(n, np.int64)
        state = ShareState(n)
        policy = state.follow(list(range(n)), self._balance.sizes(size), minibatches=n)
        samples, assigned_s = policy.shares, 0.0
        for update in range(updates):
            if update % TILE == 0:
                block_s = self._sampler.block_s(update // TILE)
            start_s = accounting.now
            work_s = block_s[update % TILE]
            fixed_s = np.minimum(self._lease_s, work_s)
            shares = np.array(samples) / size
            lease_s = np.where(shares == 1.0, work_s, fixed_s + (work_s - fixed_s) * shares)
            trips_s = self._network_s + lease_s
            ends_s = start_s + trips_s
            closed_s = float(ends_s.max())
            accounting.now = closed_s + self._update_s
            accounting.idle_s += n * (accounting.now - start_s) - float(trips_s.sum())
            if observe is not None:
                observe(accounting.now, fresh)
            # The coordinator assigns work at the event that completes the update, before the server has made it.
            state.latest = dict(enumerate(zip(samples, (ends_s - assigned_s).tolist(), strict=True)))
            state.decide(policy)
            samples, assigned_s = policy.shares, closed_s
        accounting.updates = updates
        accounting.pulls = accounting.pushes = updates * n
        accounting.use_fresh(updates * n)
