"""Bounds on the seconds per update of workers whose shares follow their speeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.distributions import Deterministic, Distribution
from paceline.clusters.timing.lease_time import LeaseTime
from paceline.policies.controllers.balance import Balance
from paceline.policies.share_limits import longest
from paceline.policies.shares import LEAST_GAIN, deal
from paceline.theory import assumptions
from paceline.theory.order_statistics import order_statistic

MIDDLES = (np.arange(1024) + 0.5) / 1024  # of a quantile function
NODES = 200  # of a quadrature
TINY = 1e-12  # seconds; a rate is finite


def bounds_s(balance: Balance, cluster: Cluster, payload_bytes: float = 0) -> tuple[float, float]:
    """Return a lower and an upper bound on the expected seconds of an update, which are equal for constant times.

    With B samples in a minibatch and shares s_i, decided before the times X_i of whole minibatches are drawn, an update
    takes ``E[max(s_i X_i)] / B``, and the time of the network:

    - It is at least ``max(s_i E[X_i]) / B``, which is smallest for the shares that are dealt by the mean times.
    - For workers that are alike it is at least E[X_{n:n}], since it is a convex and symmetric function of the shares.
    - It is at most c E[max(X_i)], where c B is the largest share.
    - Constant times without a network are known after one update, so that the first bound is reached, unless equal
      shares are within the least gain of it.

    Args:
        balance: controller of the shares.
        cluster: simulated cluster of workers that differ at most in their speeds, or have constant times.
        payload_bytes: size of the parameters, and of a gradient, in bytes, >= 0.

    Raises:
        NoTheoryError: the cluster has other properties.
    """
    _check_steady(cluster)
    n, sizes = cluster.n, balance.sizes(balance.pieces)
    network_s = cluster.network.pull_s(payload_bytes) + cluster.network.push_s(payload_bytes)
    laws = [cluster.distribution_of(worker) for worker in range(n)]
    speeds = [cluster.speed_of(worker) for worker in range(n)]
    seconds = [law.expectation_s / speed / sizes.batch_size for law, speed in zip(laws, speeds, strict=True)]
    best_s = longest(deal(seconds, sizes), seconds)
    if not network_s and all(isinstance(law, Deterministic) for law in laws):
        equal_s = max(seconds) * sizes.batch_size
        known_s = best_s if equal_s / best_s - 1 > LEAST_GAIN else equal_s
        return known_s, known_s
    if any(law != laws[0] for law in laws):
        raise assumptions.NoTheoryError("shares of workers whose distributions differ")
    slowest_s = order_statistic(laws[0], n, n) / min(speeds)
    largest = min(sizes.most, n * sizes.batch_size - (n - 1) * sizes.fewest) / sizes.batch_size
    lower_s = slowest_s if min(speeds) == max(speeds) else best_s
    return network_s + lower_s, network_s + largest * slowest_s


def queue_bounds_s(balance: Balance, cluster: Cluster, payload_bytes: float = 0) -> tuple[float, float]:
    """Return a lower and an upper bound on the expected seconds of an update whose leases are a queue.

    With the times X_i of n whole minibatches, each of m microbatches, list scheduling ends at the earliest when all is
    done at full speed, and at the latest a microbatch of the slowest worker later:

        E[n / sum(1 / X_i)]  and  E[n / sum(1 / X_i)] + E[max(X_i)] / m

    The bounds are those of updates in which no first lease takes longer than that: a first lease leaves three standard
    deviations of its worker's times. Work that is repeated ends no update later.

    Args:
        balance: controller of the shares, with a queue.
        cluster: simulated cluster of workers that differ at most in their speeds, without time of the network.
        payload_bytes: size of the parameters, and of a gradient, in bytes, >= 0.

    Raises:
        NoTheoryError: the cluster has other properties.

    Source: Graham, "Bounds for certain multiprocessing anomalies", 1966.
    """
    _check_steady(cluster)
    if cluster.network.pull_s(payload_bytes) + cluster.network.push_s(payload_bytes):
        raise assumptions.NoTheoryError(f"{balance}, of which each lease takes time of the network")
    laws = [cluster.distribution_of(worker) for worker in range(cluster.n)]
    if any(law != laws[0] for law in laws):
        raise assumptions.NoTheoryError("leases of workers whose distributions differ")
    speeds = [cluster.speed_of(worker) for worker in range(cluster.n)]
    lower_s = _harmonic_mean_s(laws[0], speeds)
    return lower_s, lower_s + _slowest_s(laws[0], speeds) / balance.pieces


def _check_steady(cluster: Cluster) -> None:
    assumptions.check_steady(cluster)
    if cluster.leases != LeaseTime():
        raise assumptions.NoTheoryError("leases with a cost, or with times of their own")


def _harmonic_mean_s(law: Distribution, speeds: Sequence[float]) -> float:
    """Return E[n / S] for the sum S of the rates 1 / X_i, as n times the integral of E[exp(-t S)] over t >= 0."""
    rates = 1 / np.maximum(law.quantile(MIDDLES), TINY)
    scale = float(rates.mean()) * sum(speeds)
    at, weights = np.polynomial.legendre.leggauss(NODES)
    u = (at + 1) / 2
    t = u / (1 - u) / scale  # from (0, 1) to (0, inf)
    transform = np.prod([np.exp(-np.outer(t * speed, rates)).mean(axis=1) for speed in speeds], axis=0)
    return float(len(speeds) * (transform * weights / 2 / (1 - u) ** 2).sum() / scale)


def _slowest_s(law: Distribution, speeds: Sequence[float]) -> float:
    """Return E[max(X_i)] as the integral of 1 - P(all X_i <= x) over x >= 0."""
    times = np.sort(np.concatenate([law.quantile(MIDDLES) / speed for speed in set(speeds)]))
    cdf = np.ones_like(times)
    for speed in speeds:
        cdf *= np.searchsorted(law.quantile(MIDDLES) / speed, times, side="right") / len(MIDDLES)
    return float((np.diff(times, prepend=0.0) * (1 - np.concatenate([[0.0], cdf[:-1]]))).sum())
