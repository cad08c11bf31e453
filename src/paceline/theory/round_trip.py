"""The one law of all round trips of a cluster, which is what the theory speaks of."""

from dataclasses import dataclass

from paceline.cluster import Cluster
from paceline.errors import UsageError
from paceline.timing import Deterministic, Exponential, Law, ServerTime, ShiftedExponential, Trace
from paceline.timing.laws import Array


class NoTheoryError(UsageError):
    """There is no theory for this protocol, or for this cluster; a simulation tells what it takes."""

    def __init__(self, what: str) -> None:
        instead = "measure it with pl.simulate(protocol, cluster, updates=10_000)"
        super().__init__(f"there is no theory for {what}; {instead}")


@dataclass(frozen=True)
class RoundTrip:
    """The law of ``compute / speed + network_s``.

    Args:
        compute: Law of the compute time at speed 1.
        speed: Factor by which it is divided, > 0.
        network_s: Seconds of pull and push, >= 0.
    """

    compute: Law
    speed: float
    network_s: float

    @property
    def expectation_s(self) -> float:
        """The mean, in seconds."""
        return self.compute.expectation_s / self.speed + self.network_s

    def quantile(self, u: Array) -> Array:
        """Return the quantile of the compute time, divided and shifted."""
        return self.compute.quantile(u) / self.speed + self.network_s


def round_trip(cluster: Cluster, payload_bytes: float = 0, *, has_server: bool = True) -> Law:
    """Return the law of every round trip of a cluster of alike workers.

    Args:
        cluster: with one law and one speed, no scenario, no faults, and a server that takes no time.
        payload_bytes: size of the parameters, and of a gradient, for its network.
        has_server: whether the network pulls and pushes; else there is an all-reduce, the same for everybody.

    Raises:
        NoTheoryError: the cluster is another one.

    >>> from paceline.timing import Network
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
    return RoundTrip(law, speed, network_s)


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
