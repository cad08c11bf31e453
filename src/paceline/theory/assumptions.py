"""Which of the protocols of the theory five knobs are."""

from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing import (
    Deterministic,
    Distribution,
    Empirical,
    Exponential,
    Gamma,
    HyperExponential,
    ServerTime,
    ShiftedExponential,
    Trace,
    Uniform,
)
from paceline.clusters.timing.distributions import Array
from paceline.errors import UsageError
from paceline.protocols.protocol import Phase, Plan, Protocol, as_plan
from paceline.utils.argument_types import checked_types


class NoTheoryError(UsageError):
    """There is no theory for this protocol, or for this cluster; a simulation tells what it takes."""

    def __init__(self, what: str) -> None:
        instead = "measure it with pl.simulate(protocol, cluster, updates=10_000)"
        super().__init__(f"there is no theory for {what}; {instead}")


@dataclass(frozen=True)
class RoundTripDistribution:
    """The law of ``compute / speed + network_s``.

    Args:
        compute: Law of the compute time at speed 1.
        speed: Factor by which it is divided, > 0.
        network_s: Seconds of pull and push, >= 0.
    """

    compute: Distribution
    speed: float
    network_s: float

    @property
    def expectation_s(self) -> float:
        """The mean, in seconds."""
        return self.compute.expectation_s / self.speed + self.network_s

    def quantile(self, u: Array) -> Array:
        """Return the quantile of the compute time, divided and shifted."""
        return self.compute.quantile(u) / self.speed + self.network_s


def round_trip(cluster: Cluster, payload_bytes: float = 0, *, has_server: bool = True) -> Distribution:
    """Return the law of every round trip of a cluster of alike workers.

    Args:
        cluster: with one law and one speed, no scenario, no faults, and a server that takes no time.
        payload_bytes: size of the parameters, and of a gradient, for its network.
        has_server: whether the network pulls and pushes; else there is an all-reduce, the same for everybody.

    Raises:
        NoTheoryError: the cluster is another one.

    >>> from paceline.clusters.timing import Network
    >>> round_trip(Cluster(4, Exponential(mean_s=2.0), speed=2.0, network=Network(latency_s=0.25)))
    ShiftedExponential(shift_s=0.5, mean_s=1.0)
    """
    _check_alike(cluster)
    law, speed = cluster.law_of(0), cluster.speed_of(0)
    network_s = cluster.network.pull_s(payload_bytes) + cluster.network.push_s(payload_bytes)
    if not has_server:
        network_s = cluster.network.all_reduce_s(cluster.n, payload_bytes)
    if speed == 1 and network_s == 0:
        return law
    match law:  # a closed form of a law is one of its shifted self
        case Deterministic(value_s):
            return Deterministic(value_s / speed + network_s)
        case Exponential(mean_s):
            return ShiftedExponential(network_s, mean_s / speed)
        case ShiftedExponential(shift_s, mean_s):
            return ShiftedExponential(shift_s / speed + network_s, mean_s / speed)
    return RoundTripDistribution(law, speed, network_s)


def _check_alike(cluster: Cluster) -> None:
    reasons = {
        "whose times are a trace": isinstance(cluster.timing, Trace),
        "whose workers differ": _differ(cluster.timing) or _differ(cluster.speed),
        "with workers that are slowed down for a while": bool(cluster.slowdowns) or cluster.transient is not None,
        "with workers that fail by script": bool(cluster.faults),
        "whose server takes time": cluster.server != ServerTime(),
    }
    for why, is_so in reasons.items():
        if is_so:
            raise NoTheoryError(f"a cluster {why}")


def _differ(given: object) -> bool:
    return isinstance(given, tuple) and any(each != given[0] for each in given)


@checked_types
def new_longer_than_used(law: Distribution) -> bool:
    """Return whether it is known that new work never takes less than work that is under way still does.

    ``P(X > u + t | X > t) <= P(X > u)`` for all t, u >= 0

    True of `Deterministic`, `Uniform`, `Exponential`, `ShiftedExponential`, of `Gamma` with shape >= 1, and of an
    `Empirical` law that is so in each of its values. Not of `Pareto`, `LogNormal` and `HyperExponential`, whose long
    times become longer the longer they have lasted. A law of the user's own is not known.

    >>> new_longer_than_used(Gamma(shape=2.0, mean_s=1.0)), new_longer_than_used(Gamma(shape=0.5, mean_s=1.0))
    (True, False)

    Source: Dutta et al., AISTATS 2018, Definition 3 (in reliability: "new better than used").
    """
    match law:
        case Deterministic() | Uniform() | Exponential() | ShiftedExponential():
            return True
        case Gamma(shape):
            return shape >= 1
        case HyperExponential(means_s):
            return len(set(means_s)) == 1
        case Empirical():
            return _every_value_ages(law)
        case RoundTripDistribution(compute):  # work of a constant length before it, and a stretch, keep the property
            return new_longer_than_used(compute)
    return False


@checked_types
def new_shorter_than_used(law: Distribution) -> bool:
    """Return whether it is known that new work never takes longer than work that is under way still does.

    ``P(X > u + t | X > t) >= P(X > u)`` for all t, u >= 0

    True of `Exponential`, `HyperExponential`, and of `Gamma` with shape <= 1. A constant part in the time destroys
    it: `Pareto`, whose smallest value is above 0, has neither property.

    Source: Dutta et al., AISTATS 2018, Sect. 4.3 (in reliability: "new worse than used").
    """
    match law:
        case Exponential() | HyperExponential():
            return True
        case ShiftedExponential(shift_s):
            return shift_s == 0
        case Gamma(shape):
            return shape <= 1
        case RoundTripDistribution(compute, _, network_s):
            return network_s == 0 and new_shorter_than_used(compute)
    return False


@checked_types
def memoryless(law: Distribution) -> bool:
    """Return whether new work and work under way take equally long: of all laws only the exponential."""
    return new_longer_than_used(law) and new_shorter_than_used(law)


def _every_value_ages(law: Empirical) -> bool:
    """Compare ``P(X > u + t)`` with ``P(X > u) P(X > t)`` where the left side jumps down last: at pairs of values."""
    values_s = np.array(law.values_s)
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
class Recognised:
    """A protocol of the theory, on n workers.

    Attributes:
        name: of the family; K = n makes `k_sync` fully synchronous, K = 1 makes `k_batch_async` fully asynchronous.
            `backup` and `pull` are K-sync and K-batch-sync whose workers finish stale work.
        k: gradients of an update.
    """

    name: Name
    k: int

    @property
    def is_fresh(self) -> bool:
        """Whether every gradient is of the newest version."""
        return self.name in {"k_sync", "k_batch_sync", "backup", "pull"}


def recognise(protocol: Protocol | Phase | Plan, n: int) -> Recognised:
    """Return which protocol of the theory this is on n workers.

    Where everybody is waited for nobody is late, so that all protocols of one gradient a worker are `k_sync`; where
    one is waited for nobody waits, so that `k_async` is `k_batch_async`. All-reduce of gradients is `k_sync`, too, of
    round trips that end with the sum.

    Raises:
        NoTheoryError: it is none of them.
        UsageError: n workers can never fill its quorum.

    >>> from paceline.catalogue.protocols import bsp, k_async
    >>> recognise(bsp(), n=8), recognise(k_async(k=1), n=8)
    (Recognised(name='k_sync', k=8), Recognised(name='k_batch_async', k=1))
    """
    knobs = _alone(protocol)
    _check_reduction(as_plan(protocol))
    knobs.check_workers(n)
    k = n if knobs.quorum == "all" else knobs.quorum
    if knobs.refill == "update" and k == n:
        return Recognised("k_sync", k)
    if knobs.max_lead == inf and not (knobs.quorum == "all" and knobs.refill == "arrival"):
        if knobs.max_staleness == 0 and knobs.on_update == "interrupt":
            return Recognised("k_sync" if knobs.refill == "update" else "k_batch_sync", k)
        if knobs.max_staleness == 0:
            return Recognised("backup" if knobs.refill == "update" else "pull", k)
        if knobs.max_staleness == inf:
            return Recognised("k_async" if knobs.refill == "update" and k > 1 else "k_batch_async", k)
    raise NoTheoryError(knobs.name)


def _check_reduction(plan: Plan) -> None:
    if plan.reduction is not None and plan.reduction.sums != "gradients":
        raise NoTheoryError(f"{plan}, whose workers step for themselves")


def _alone(protocol: Protocol | Phase | Plan) -> Protocol:
    plan = as_plan(protocol)
    if len(plan.phases) > 1 or plan.phases[0].controllers:
        raise NoTheoryError(f"{plan}, whose knobs change")
    return plan.phases[0].protocol
