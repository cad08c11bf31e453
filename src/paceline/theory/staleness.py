"""Expected staleness of the gradients of a protocol, in versions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.distributions import Deterministic, Distribution
from paceline.protocols.protocol import Phase, Plan, Protocol
from paceline.theory import assumptions
from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range

Survival = Callable[[int], float]
"""Function from a staleness to the share of gradients of at least this staleness."""


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """Staleness of the gradients that enter updates, in the long run.

    Attributes:
        mean: mean staleness in versions, >= 0.
        fresh_lower: lower bound on p_0, the share of gradients of the newest version, given the past.
        fresh_upper: upper bound on that share in the long run.
        at_least: function from a staleness to the share of gradients of at least this staleness; None if unknown.
    """

    mean: float
    fresh_lower: float
    fresh_upper: float
    at_least: Survival | None = field(default=None, repr=False, compare=False)

    @property
    def fresh_share(self) -> float | None:
        """Share of gradients of the newest version; None if only bounds are known."""
        return self.fresh_lower if self.fresh_lower == self.fresh_upper else None

    def share(self, staleness: int) -> float:
        """Return the share of gradients of this staleness, >= 0.

        Raises:
            NoTheoryError: the times are neither exponential nor constant.
        """
        check_range("[0, inf)", Integral, staleness=staleness)
        if self.at_least is None:
            raise assumptions.NoTheoryError("the distribution of staleness, unless times are exponential or constant")
        return self.at_least(staleness) - self.at_least(staleness + 1)


@checked_types
def staleness(protocol: Protocol | Phase | Plan, cluster: Cluster, payload_bytes: float = 0) -> Staleness:
    """Return the expected staleness of the gradients of a protocol.

    The mean is the same for every distribution of times, because a worker's version grows by staleness + 1 from one
    gradient to the next:

    - K-async: ``n / K - 1``. A worker reads the version that its gradient made, and delivers one of n gradients.
    - K-batch-async: ``(n - 1) / K``. A worker reads at once, which is the new version for one of K gradients only.
    - K-sync and K-batch-sync: 0.

    The distribution of staleness for exponential times:

    - K-async: ``p_0 (1 - p_0)**s`` with ``p_0 = K / n``. At an update all workers are equal, so any K of n come next.
    - K-batch-async: at least s with probability ``(n - 1) / K * (1 - q**K) * q**((s - 1) K)`` for s >= 1, with
      ``q = 1 - 1/n``. Each gradient is from a given worker with probability 1/n, so the number of gradients of other
      workers in between is geometric; each K of them make a version.

    Args:
        protocol: protocol of one of these families.
        cluster: simulated cluster of identical workers.
        payload_bytes: size of the parameters, and of a gradient, in bytes, >= 0.

    Raises:
        NoTheoryError: the theory does not cover the protocol or the cluster.

    >>> from paceline.catalogue.protocols import asp, k_async
    >>> staleness(k_async(k=2), Cluster(8))
    Staleness(mean=3.0, fresh_lower=0.25, fresh_upper=0.25)
    >>> staleness(asp(), Cluster(4)).share(0)
    0.25

    Source: Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018, Lemma 8; the rest is from
    paceline.

    Differs from the paper: it has p_0 = 1/n for every K, which is right for K = 1 and too low otherwise. For times that
    are not exponential it bounds p_0 by 1/n from above (new longer than used; the bound of K-async is K/n) or from
    below (new shorter than used). In addition ``p_0 >= 1 - mean``, because a stale gradient adds at least 1.
    """
    known = assumptions.protocol_family(protocol, cluster.n)
    if known.is_fresh:
        return Staleness(mean=0.0, fresh_lower=1.0, fresh_upper=1.0, at_least=lambda s: float(s <= 0))
    distribution = assumptions.round_trip(cluster, payload_bytes)
    mean = cluster.n / known.k - 1 if known.name == "k_async" else (cluster.n - 1) / known.k
    if assumptions.memoryless(distribution):
        at_least = _memoryless(known, cluster.n)
    elif isinstance(distribution, Deterministic):  # every n-th gradient is from the same worker
        at_least = _between(mean)
    else:
        lower, upper = _bounds_of_fresh_share(known, distribution, cluster.n, mean)
        return Staleness(mean=mean, fresh_lower=lower, fresh_upper=upper)
    fresh = 1 - at_least(1)
    return Staleness(mean=mean, fresh_lower=fresh, fresh_upper=fresh, at_least=at_least)


def _between(mean: float) -> Survival:
    """Return the distribution on the two whole numbers next to a mean."""
    return lambda s: min(max(mean - s + 1, 0.0), 1.0)


def _memoryless(known: assumptions.ProtocolFamily, n: int) -> Survival:
    """Return the distribution of staleness for exponential times."""
    k, q = known.k, 1 - 1 / n
    if known.name == "k_async":
        return lambda s: (1 - k / n) ** max(s, 0)
    return lambda s: 1.0 if s <= 0 else (n - 1) / k * (1 - q**k) * q ** ((s - 1) * k)


def _bounds_of_fresh_share(
    known: assumptions.ProtocolFamily, distribution: Distribution, n: int, mean: float
) -> tuple[float, float]:
    if_equal = known.k / n if known.name == "k_async" else 1 / n
    lower, upper = max(0.0, 1 - mean), 1.0
    if assumptions.new_shorter_than_used(distribution):
        lower = max(lower, if_equal)
    if assumptions.new_longer_than_used(distribution) and (known.name == "k_async" or known.k == 1):
        upper = if_equal
    return lower, upper
