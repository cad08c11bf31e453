"""How stale the gradients of a protocol are, in versions, before anything runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing import Deterministic, Distribution
from paceline.protocols.protocol import Phase, Plan, Protocol
from paceline.theory.assumptions import (
    NoTheoryError,
    Recognised,
    memoryless,
    new_longer_than_used,
    new_shorter_than_used,
    recognise,
    round_trip,
)
from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range

Survival = Callable[[int], float]
"""The share of gradients whose staleness is at least this."""


@dataclass(frozen=True)
class Staleness:
    """Staleness of the gradients that enter updates, in the long run.

    Attributes:
        mean: in versions.
        fresh_lower: lower bound on p_0, the share of gradients of the newest version, given all that was before.
        fresh_upper: upper bound on that share in the long run.
        at_least: the share of gradients of at least this staleness, where it is known exactly.
    """

    mean: float
    fresh_lower: float
    fresh_upper: float
    at_least: Survival | None = field(default=None, repr=False, compare=False)

    @property
    def fresh_share(self) -> float | None:
        """The share of gradients of the newest version; None where only bounds are known."""
        return self.fresh_lower if self.fresh_lower == self.fresh_upper else None

    def share(self, staleness: int) -> float:
        """Return the share of gradients of this staleness, >= 0.

        Raises:
            NoTheoryError: the distribution is known for exponential and for constant times only.
        """
        check_range("[0, inf)", Integral, staleness=staleness)
        if self.at_least is None:
            raise NoTheoryError("how staleness is distributed where times are neither exponential nor constant")
        return self.at_least(staleness) - self.at_least(staleness + 1)


@checked_types
def staleness(protocol: Protocol | Phase | Plan, cluster: Cluster, payload_bytes: float = 0) -> Staleness:
    """Return how stale the gradients of a protocol are.

    The mean is the same for every law, because a worker's versions go up by staleness + 1 from gradient to gradient:

    - K-async: ``n / K - 1``. It reads the version that its gradient made, and brings one of n gradients, K an update.
    - K-batch-async: ``(n - 1) / K``. It reads at once, which is the new version for one gradient of K only.
    - K-sync and K-batch-sync: 0.

    The distribution, for exponential times:

    - K-async: ``p_0 (1 - p_0)**s`` with ``p_0 = K / n``. At an update nobody is ahead, so any K of n come next.
    - K-batch-async: at least s with probability ``(n - 1) / K * (1 - q**K) * q**((s - 1) K)`` for s >= 1, with
      ``q = 1 - 1/n``. Each gradient is of any worker with probability 1/n, so gradients of others in between are
      geometric; K of them, counted from anywhere in an update, are a version.

    Args:
        protocol: any whose knobs are one of these.
        cluster: simulated, of alike workers.
        payload_bytes: size of the parameters, and of a gradient, for its network.

    Raises:
        NoTheoryError: the protocol or the cluster is another one; a simulation is offered.

    >>> from paceline.catalogue.protocols import asp, k_async
    >>> staleness(k_async(k=2), Cluster(8))
    Staleness(mean=3.0, fresh_lower=0.25, fresh_upper=0.25)
    >>> staleness(asp(), Cluster(4)).share(0)
    0.25

    Source: Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018, Lemma 8; the rest is our own.

    Differs from the paper: it has p_0 = 1/n for every K, which is right for K = 1 and low otherwise. For other laws
    than the exponential it bounds p_0 by 1/n from above (new longer than used, where K/n is the bound of K-async) or
    below (new shorter than used); here is also ``p_0 >= 1 - mean``, since a gradient that is not fresh adds 1 or more.
    """
    law, known = round_trip(cluster, payload_bytes), recognise(protocol, cluster.n)
    if known.is_fresh:
        return Staleness(0.0, 1.0, 1.0, lambda s: float(s <= 0))
    at_least = _k_async(law, known.k, cluster.n) if known.name == "k_async" else _batch_async(law, known.k, cluster.n)
    mean = cluster.n / known.k - 1 if known.name == "k_async" else (cluster.n - 1) / known.k
    if at_least is not None:
        fresh = 1 - at_least(1)
        return Staleness(mean, fresh, fresh, at_least)
    return Staleness(mean, *_bounds_of_fresh_share(known, law, cluster.n, mean))


def _k_async(law: Distribution, k: int, n: int) -> Survival | None:
    if memoryless(law):
        return lambda s: (1 - k / n) ** max(s, 0)
    if isinstance(law, Deterministic):  # the order of workers never changes: every n-th gradient is a worker's
        return _between(n / k - 1)
    return None


def _batch_async(law: Distribution, k: int, n: int) -> Survival | None:
    if memoryless(law):
        q = 1 - 1 / n
        return lambda s: 1.0 if s <= 0 else (n - 1) / k * (1 - q**k) * q ** ((s - 1) * k)
    if isinstance(law, Deterministic):
        return _between((n - 1) / k)
    return None


def _between(mean: float) -> Survival:
    """Return the distribution on the two whole numbers around a mean."""
    return lambda s: min(max(mean - s + 1, 0.0), 1.0)


def _bounds_of_fresh_share(known: Recognised, law: Distribution, n: int, mean: float) -> tuple[float, float]:
    if_equal = known.k / n if known.name == "k_async" else 1 / n
    lower, upper = max(0.0, 1 - mean), 1.0
    if new_shorter_than_used(law):
        lower = max(lower, if_equal)
    if new_longer_than_used(law) and (known.name == "k_async" or known.k == 1):
        upper = if_equal
    return lower, upper
