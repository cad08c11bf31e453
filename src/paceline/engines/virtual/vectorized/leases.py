"""Simulation of updates whose samples are a queue of leases, for very many workers."""

from __future__ import annotations

import struct
from dataclasses import replace
from math import inf, log, sqrt
from typing import Any

import numpy as np

from paceline.clusters.simulated import TILE, Cluster
from paceline.clusters.timing.network import Network
from paceline.engines.virtual.vectorized import lease_arrays as arrays
from paceline.engines.virtual.vectorized import speed_loops
from paceline.engines.virtual.vectorized.accounting import Observer, VectorizedAccounting
from paceline.engines.virtual.vectorized.lease_loops import run_update
from paceline.engines.virtual.vectorized.sampling import Floats, Ints, RoundTripSampler
from paceline.policies.controllers.balance import COSTS, Balance
from paceline.policies.shares import LEAST_TIMES, NOISE_FACTOR, SPREADS, WINDOW


class QueuedLeases:
    """Simulation of `balanced` with a queue: the shares of all workers in arrays, and the leases in compiled loops.

    The rules are those of `LeaseQueue`, `ShareState` and `ShareBalancer`, with the same bits.

    Args:
        balance: controller of the shares.
        cluster: cluster with times independent of the virtual time, and no server time per gradient.
        seed: seed of the run, >= 0.
        payload_bytes: bytes of the parameters, and of a gradient, >= 0.
    """

    def __init__(self, balance: Balance, cluster: Cluster, seed: int, payload_bytes: float = 0) -> None:
        n = cluster.n
        self.accounting = VectorizedAccounting(n)
        self._n = n
        self._size = balance.pieces
        self._most = balance.sizes(self._size).most
        self._repeats = balance.repeats
        self._update_s = cluster.server.update_s
        self._cost_s = cluster.leases.cost_s
        self._network_s = cluster.network.pull_s(payload_bytes) + cluster.network.push_s(payload_bytes)
        self._sampler = RoundTripSampler(replace(cluster, network=Network()), seed)  # of compute times alone
        self._shares = np.full(n, self._size)
        self._equal = self._shares
        self._medians_s = np.full(n, np.nan)
        self._known = arrays.Known(
            values=np.zeros((n, WINDOW)),
            lengths=_zeros(n),
            before=np.zeros((n, WINDOW)),
            before_lengths=_zeros(n),
            jumps=np.array([0, 2]),
        )
        self._costs = arrays.Costs(latest_s=np.zeros(COSTS), ordered_s=np.zeros(COSTS))
        entries = n + n * self._size + 1  # with those of cancelled tasks
        self._tasks = arrays.Tasks(
            rows=np.zeros(n, arrays.WORKER),
            idle_since=np.arange(n),
            heap=_zeros(entries),
            heap_s=np.zeros(entries),
        )

    def run(self, updates: int, observe: Observer | None = None) -> None:
        """Simulate this number of updates."""
        accounting, n = self.accounting, self._n
        most = n * self._size
        record = arrays.Record(
            counts=_zeros(9),
            sums=np.zeros(3),
            once=_zeros(n + most),
            taken=_zeros(n + most),
            workers=_zeros(n + most),
            samples=_zeros(n + most),
            elapsed_s=np.zeros(n + most),
        )
        record.counts[arrays.IDLE] = n
        trips = arrays.Trips(self._cost_s, self._network_s, self._size)
        ended_s = 0.0
        for update in range(updates):
            if update % TILE == 0:
                block_s = self._sampler.block_s(update // TILE)
            first, later = self._open(record)
            opening = arrays.Opening(
                work_s=np.ascontiguousarray(block_s[update % TILE]),
                first=first,
                idle=np.argsort(self._tasks.idle_since),
                left=int(most - first.sum()),
                later=later,
                repeats=self._repeats,
                assigned_s=ended_s,
                begun_s=accounting.now,
            )
            before = int(record.counts[arrays.ARRIVALS])
            ended_s = run_update(self._tasks, self._costs, trips, opening, record)
            accounting.now = ended_s + self._update_s
            if observe is not None:
                observe(accounting.now, _zeros(int(record.counts[arrays.ARRIVALS]) - before))
            accounting.interrupted += int(record.counts[arrays.CANCELLED])
        accounting.updates = updates
        accounting.pulls = int(record.counts[arrays.PULLS])
        accounting.pushes = int(record.counts[arrays.ARRIVALS])
        accounting.idle_s = n * accounting.now - float(record.sums[arrays.BUSY_S])
        accounting.wasted_s = float(record.sums[arrays.BUSY_S] - record.sums[arrays.USEFUL_S])
        accounting.use_fresh(accounting.pushes)

    def _open(self, record: Any) -> tuple[Ints, int]:
        """Decide the shares of an update by those before it; return the samples of first leases, and of a later one."""
        speed_loops.add_cancelled_leases(self._tasks.rows, self._known, record)
        speed_loops.add_ended_leases(self._tasks.rows, self._known)
        variance = speed_loops.spread(self._known, self._medians_s)
        sigma = sqrt(variance) if variance < inf else inf
        self._decide(sigma)
        first, later = self._cut_in_leases(sigma, float(record.sums[arrays.LEASE_S]))
        return np.minimum(first, self._most), later

    def _decide(self, sigma: float) -> None:
        """Take new shares as `ShareBalancer.decide`."""
        fewest = int(self._known.lengths.min())
        if fewest < (1 if self._known.jumps[0] > self._known.jumps[1] else LEAST_TIMES):
            return
        costs_s = self._medians_s
        before_s = float((self._shares * costs_s).max())
        for new in (_dealt(costs_s, int(self._equal.sum())), self._equal):
            gain = before_s / float((new * costs_s).max()) - 1
            noise = NOISE_FACTOR * 1.25 * sigma / sqrt(fewest)
            is_better = gain >= 0 if np.array_equal(new, self._equal) else gain > 0.0 and gain > noise
            if is_better and not np.array_equal(new, self._shares):
                self._shares = new
                return

    def _cut_in_leases(self, sigma: float, lease_s: float) -> tuple[Ints, int]:
        """Return the first lease of each worker, and the samples of a later one, as `cut_in_leases`."""
        shares, seconds = self._shares, self._medians_s
        left = np.minimum(np.rint(min(SPREADS * sigma, 0.5) * shares).astype(np.int64), shares - 1)
        known = seconds > 0
        most, piece_s = int(left.max()), float(seconds[known].min(initial=inf))
        later = max(1, min(most, self._most, round(sqrt(2 * most * lease_s / piece_s))))
        if sigma < inf:
            whole_s = float((shares[known] * seconds[known]).max(initial=0.0))
            late_s = whole_s * sigma * sqrt(2 * log(len(shares)))
            if late_s <= (later * piece_s / 2 if known.any() else 0.0) + lease_s * most / later:
                return shares, later
        return shares - left, later


def _zeros(length: int) -> Ints:
    return np.zeros(length, np.int64)


def _dealt(seconds: Floats, samples: int) -> Ints:
    """Return the shares that end an update first, as `deal` with pieces of one sample.

    The pieces beside the first one of each worker are those with the earliest ends, and of equal ends those of the
    smallest shares. So the latest end that is needed is searched for, among all numbers.
    """
    wanted = samples - len(seconds)
    pieces = _zeros(len(seconds))
    low, high = 0, _bits(float(seconds.max()) * (wanted + 1))
    while high - low > 1:
        middle = (low + high) // 2
        if speed_loops.pieces_until(seconds, _number(middle), pieces) >= wanted:
            high = middle
        else:
            low = middle
    missing = wanted - speed_loops.pieces_until(seconds, _number(low), pieces)
    at_end = np.flatnonzero(seconds * (pieces + 2) == _number(high))
    chosen = at_end[np.argsort(pieces[at_end], kind="stable")][:missing]
    pieces[chosen] += 1
    return pieces + 1


def _bits(number: float) -> int:
    """Return the bits of a positive number, whose order is that of the numbers."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number
