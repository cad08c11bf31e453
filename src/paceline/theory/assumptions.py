"""Assumptions of the theory: which protocols, clusters and compute-time distributions it covers."""

from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing import distributions as timing
from paceline.clusters.timing.distributions import Array
from paceline.clusters.timing.network import ServerTime
from paceline.clusters.timing.trace import Trace
from paceline.errors import UsageError
from paceline.protocols.protocol import Phase, Plan, Protocol, as_plan
from paceline.utils.argument_types import checked_types


class NoTheoryError(UsageError):
    """The theory does not cover this protocol or this cluster; the message names the simulation to run instead."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"there is no theory for {what}; measure it with pl.simulate(protocol, cluster, updates=10_000)"
        )


@dataclass(frozen=True)
class RoundTripDistribution:
    """Distribution of ``compute / speed + network_s``.

    Args:
        compute: distribution of the compute time at speed 1.
        speed: divisor of the compute time, > 0.
        network_s: seconds of pull and push, >= 0.
    """

    compute: timing.Distribution
    speed: float
    network_s: float

    @property
    def expectation_s(self) -> float:
        """Mean in seconds."""
        return self.compute.expectation_s / self.speed + self.network_s

    def quantile(self, u: Array) -> Array:
        """Return the quantiles in seconds for probabilities u in [0, 1)."""
        return self.compute.quantile(u) / self.speed + self.network_s


def round_trip(cluster: Cluster, payload_bytes: float = 0, *, has_server: bool = True) -> timing.Distribution:
    """Return the distribution of the round trips of a cluster of identical workers.

    Args:
        cluster: cluster with one distribution and one speed, without slowdowns, faults and server time.
        payload_bytes: size of the parameters, and of a gradient, in bytes, >= 0.
        has_server: whether workers pull and push; else they run an all-reduce.

    Raises:
        NoTheoryError: the cluster has other properties.

    >>> from paceline.timing import Network
    >>> round_trip(Cluster(4, timing.Exponential(mean_s=2.0), speed=2.0, network=Network(latency_s=0.25)))
    ShiftedExponential(shift_s=0.5, mean_s=1.0)
    """
    _check_alike(cluster)
    distribution, speed = cluster.distribution_of(0), cluster.speed_of(0)
    network_s = cluster.network.pull_s(payload_bytes) + cluster.network.push_s(payload_bytes)
    if not has_server:
        network_s = cluster.network.all_reduce_s(cluster.n, payload_bytes)
    if speed == 1 and network_s == 0:
        return distribution
    match distribution:  # a distribution with a closed form keeps it when shifted
        case timing.Deterministic(value_s):
            return timing.Deterministic(value_s / speed + network_s)
        case timing.Exponential(mean_s):
            return timing.ShiftedExponential(network_s, mean_s / speed)
        case timing.ShiftedExponential(shift_s, mean_s):
            return timing.ShiftedExponential(shift_s / speed + network_s, mean_s / speed)
    return RoundTripDistribution(distribution, speed, network_s)


def _check_alike(cluster: Cluster) -> None:
    if _differ(cluster.timing) or _differ(cluster.speed):
        raise NoTheoryError("a cluster whose workers differ")
    check_steady(cluster)


def check_steady(cluster: Cluster) -> None:
    """Raise a NoTheoryError for a cluster with a trace, slowdowns, faults or server time."""
    reasons = {
        "with a trace as its timing": isinstance(cluster.timing, Trace),
        "with slowdowns of workers": bool(cluster.slowdowns) or cluster.transient is not None,
        "with scripted faults": bool(cluster.faults),
        "with server time": cluster.server != ServerTime(),
    }
    for why, is_so in reasons.items():
        if is_so:
            raise NoTheoryError(f"a cluster {why}")


def _differ(given: object) -> bool:
    return isinstance(given, tuple) and any(each != given[0] for each in given)


@checked_types
def new_longer_than_used(distribution: timing.Distribution) -> bool:
    """Return whether new work takes at least as long as the rest of work in progress (new better than used).

    ``P(X > u + t | X > t) <= P(X > u)`` for all t, u >= 0

    True for `Deterministic`, `Uniform`, `Exponential`, `ShiftedExponential`, `Gamma` with shape >= 1, and for an
    `Empirical` distribution that satisfies it at each of its values. False for `Pareto`, `LogNormal` and
    `HyperExponential`, whose remaining time grows with the time spent. False for distributions of the user.

    Args:
        distribution: distribution of a compute time.

    >>> [new_longer_than_used(timing.Gamma(shape, mean_s=1.0)) for shape in (2.0, 0.5)]
    [True, False]

    Source: Dutta et al., AISTATS 2018, Definition 3 ("new better than used" in reliability theory).
    """
    match distribution:
        case timing.Deterministic() | timing.Uniform() | timing.Exponential() | timing.ShiftedExponential():
            return True
        case timing.Gamma(shape):
            return shape >= 1
        case timing.HyperExponential(means_s):
            return len(set(means_s)) == 1
        case timing.Empirical():
            return _every_value_ages(distribution)
        case RoundTripDistribution(compute):  # a constant shift and a scale keep the property
            return new_longer_than_used(compute)
    return False


@checked_types
def new_shorter_than_used(distribution: timing.Distribution) -> bool:
    """Return whether new work takes at most as long as the rest of work in progress (new worse than used).

    ``P(X > u + t | X > t) >= P(X > u)`` for all t, u >= 0

    True for `Exponential`, `HyperExponential` and `Gamma` with shape <= 1. False for distributions with a constant
    part: `Pareto`, whose smallest value is above 0, has neither property.

    Args:
        distribution: distribution of a compute time.

    Source: Dutta et al., AISTATS 2018, Sect. 4.3 ("new worse than used" in reliability theory).
    """
    match distribution:
        case timing.Exponential() | timing.HyperExponential():
            return True
        case timing.ShiftedExponential(shift_s):
            return shift_s == 0
        case timing.Gamma(shape):
            return shape <= 1
        case RoundTripDistribution(compute, _, network_s):
            return network_s == 0 and new_shorter_than_used(compute)
    return False


@checked_types
def memoryless(distribution: timing.Distribution) -> bool:
    """Return whether the distribution is memoryless, which only the exponential is.

    Args:
        distribution: distribution of a compute time.
    """
    return new_longer_than_used(distribution) and new_shorter_than_used(distribution)


def _every_value_ages(distribution: timing.Empirical) -> bool:
    """Return whether ``P(X > u + t) <= P(X > u) P(X > t)`` at all pairs of values, where the left side jumps."""
    values_s = np.array(distribution.values_s)
    m = len(values_s)
    at_s = np.unique(values_s)
    beyond = m - np.searchsorted(values_s, at_s, side="right")
    for t_s, beyond_t in zip(at_s, beyond, strict=True):
        beyond_both = m - np.searchsorted(values_s, at_s + t_s, side="right")
        if np.any(beyond_both * m > beyond * beyond_t):
            return False
    return True


Name = Literal["k_sync", "k_batch_sync", "k_async", "k_batch_async", "backup", "pull"]


@dataclass(frozen=True)
class ProtocolFamily:
    """Protocol family of the theory, for n workers.

    Attributes:
        name: name of the family. `k_sync` with K = n is fully synchronous, `k_batch_async` with K = 1 fully
            asynchronous. `backup` and `pull` are K-sync and K-batch-sync whose workers finish stale work.
        k: number of gradients of an update, >= 1.
    """

    name: Name
    k: int

    @property
    def is_fresh(self) -> bool:
        """Whether every gradient is of the newest version."""
        return self.name in {"k_sync", "k_batch_sync", "backup", "pull"}


def protocol_family(protocol: Protocol | Phase | Plan, n: int) -> ProtocolFamily:
    """Return the family of a protocol on n workers.

    If an update waits for all workers, no gradient is stale, so every protocol with one gradient per worker is
    `k_sync`, also where their shares differ. If it waits for one gradient, `k_async` equals `k_batch_async`. All-reduce
    of gradients is `k_sync` with the sum as part of the round trip.

    Raises:
        NoTheoryError: the protocol is in no family.
        UsageError: n workers can never fill its quorum.

    >>> from paceline.catalogue.protocols import bsp, k_async
    >>> protocol_family(bsp(), n=8), protocol_family(k_async(k=1), n=8)
    (ProtocolFamily(name='k_sync', k=8), ProtocolFamily(name='k_batch_async', k=1))
    """
    knobs = _constant_protocol(protocol)
    _check_reduction(as_plan(protocol))
    knobs.check_workers(n)
    k = n if knobs.quorum == "all" else knobs.quorum
    if knobs.refill != "arrival" and k == n:
        return ProtocolFamily("k_sync", k)
    if knobs.max_lead == inf and not (knobs.quorum == "all" and knobs.refill == "arrival"):
        if knobs.max_staleness == 0 and knobs.on_update == "interrupt":
            return ProtocolFamily("k_sync" if knobs.refill == "update" else "k_batch_sync", k)
        if knobs.max_staleness == 0:
            return ProtocolFamily("backup" if knobs.refill == "update" else "pull", k)
        if knobs.max_staleness == inf:
            return ProtocolFamily("k_async" if knobs.refill == "update" and k > 1 else "k_batch_async", k)
    raise NoTheoryError(knobs.name)


def _check_reduction(plan: Plan) -> None:
    if plan.allreduce is not None and plan.allreduce.sums != "gradients":
        raise NoTheoryError(f"{plan}, whose workers take steps of their own")


def _constant_protocol(protocol: Protocol | Phase | Plan) -> Protocol:
    plan = as_plan(protocol)
    if len(plan.phases) > 1 or not all(controller.sets_shares for controller in plan.phases[0].controllers):
        raise NoTheoryError(f"{plan}, whose knobs change during the run")
    return plan.phases[0].protocol
