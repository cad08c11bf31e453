"""Bounds on the seconds per update of workers whose shares follow their speeds."""

from __future__ import annotations

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.distributions import Deterministic
from paceline.policies.controllers.balance import Balance
from paceline.policies.share_limits import longest
from paceline.policies.shares import LEAST_GAIN, deal
from paceline.theory import assumptions
from paceline.theory.order_statistics import order_statistic


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
    assumptions.check_steady(cluster)
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
