"""Expected runtime: seconds per update of a protocol, each formula with its lemma."""

from dataclasses import dataclass
from math import ceil, isinf, log
from typing import Literal

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.distributions import Deterministic, Distribution, Exponential
from paceline.errors import UsageError
from paceline.policies.controllers.balance import Balance
from paceline.protocols.protocol import Phase, Plan, Protocol, as_plan
from paceline.theory import assumptions
from paceline.theory.balanced_runtime import bounds_s, queue_bounds_s
from paceline.theory.order_statistics import log_harmonic, order_statistic
from paceline.theory.renewal import MOST, time_of_gradients
from paceline.theory.stale_work import finish_and_continue, finish_and_idle
from paceline.utils.argument_types import checked_types

Kind = Literal["exact", "computed", "upper bound", "simulated"]
COMPUTED_WIDTH = 0.01


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected seconds per update in the long run.

    Attributes:
        seconds_per_update: the expectation if the kind is "exact"; if "computed", the middle of bounds at most 1 %
            apart; if "simulated", the mean of a simulation; else the upper bound.
        kind: accuracy, "exact", "computed", "upper bound" or, in `tradeoff` and ``paceline theory``, "simulated".
        source: lemma or theorem; the number of updates if simulated.
        lower_s: lower bound on the expectation in seconds.
        upper_s: upper bound on the expectation in seconds.
        k: number of gradients of an update, >= 1; the rounded mean if simulated.
    """

    seconds_per_update: float
    kind: Kind
    source: str
    lower_s: float
    upper_s: float
    k: int

    @property
    def updates_per_s(self) -> float:
        """Updates per second."""
        return 1 / self.seconds_per_update

    @property
    def gradients_per_s(self) -> float:
        """Gradients per second that enter updates."""
        return self.k / self.seconds_per_update


@checked_types
def expected(protocol: Protocol | Phase | Plan, cluster: Cluster, payload_bytes: float = 0) -> Expected:
    """Return the expected seconds per update of a protocol, in the long run.

    For n workers, independent round trips with distribution X, and K gradients per update:

    - K-sync, and synchronous for K = n: E[X_{K:n}] (Lemma 3). All-reduce of gradients is the same, with its sum in X.
    - K-batch-async, and asynchronous for K = 1: K E[X] / n (Lemma 4).
    - K-batch-sync: K E[X] / n if exponential, ceil(K/n) X if constant, and otherwise the renewal integral, computed to
      bounds at most 1 % apart.
    - K-async: E[X_{K:n}] if exponential (Theorem 2), X / floor(n/K) if constant, and otherwise bounds.
    - Backup workers that finish stale work, `backup` (Push & Wait) and `pull`: a Markov chain, if exponential.
    - Shares that follow the speeds, `balanced`: bounds of list scheduling; with one share each the best division if
      times are constant, and otherwise bounds.

    Args:
        protocol: protocol of one of these families.
        cluster: simulated cluster of identical workers; for `balanced` they may differ in their speeds.
        payload_bytes: size of the parameters, and of a gradient, in bytes, >= 0.

    Raises:
        NoTheoryError: the theory does not cover the protocol or the cluster.
        UsageError: the expectation is infinite, or n workers can never fill the quorum. The expectation of K-batch-sync
            is infinite if E[X_{1:n}] is: for Pareto times of shape at most 1/n.

    >>> from paceline.catalogue.protocols import balanced, bsp, k_async
    >>> from paceline.clusters.timing.distributions import Deterministic, Uniform
    >>> expected(bsp(), Cluster(2))
    Expected(seconds_per_update=1.5, kind='exact', source='Lemma 3', lower_s=1.5, upper_s=1.5, k=2)
    >>> expected(k_async(k=2), Cluster(4, Uniform(0.0, 1.0))).kind
    'upper bound'
    >>> one_at_half = Cluster(4, Deterministic(0.1), speed=[1, 1, 1, 0.5])
    >>> [expected(each, one_at_half).seconds_per_update for each in (balanced(m=8, leases=1), balanced(m=64, leases=1))]
    [0.125, 0.115625]

    Source: Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018, Sect. 4.

    Differs from the paper: Lemma 5 has only an upper bound for K-async, for distributions that are new longer than
    used. For any distribution the time is at least K E[X] / n (a worker delivers one gradient per E[X]) and
    E[X_{2K-n:K}] (the other workers deliver at most n - K of the gradients), and at most E[X_{K:K}] (the K workers that
    have just started are enough). If new work is shorter than used, the inequality of Lemma 5 is reversed. K-batch-sync
    is computed, for K up to 256.
    """
    known, n = assumptions.protocol_family(protocol, cluster.n), cluster.n
    if as_plan(protocol).sets_shares:
        return _balanced(as_plan(protocol), cluster, payload_bytes)
    distribution = assumptions.round_trip(cluster, payload_bytes, has_server=as_plan(protocol).allreduce is None)
    k = known.k
    match known.name:
        case "k_sync":
            return _exact(order_statistic(distribution, k, n), "Lemma 3", k)
        case "k_async":
            return _k_async(distribution, k, n)
        case "k_batch_sync":
            return _k_batch_sync(distribution, k, n)
        case "k_batch_async":
            return _exact(k * _mean_s(distribution) / n, "Lemma 4", k)
        case "backup":
            return _chain(distribution, k, finish_and_idle(k, n))
        case "pull":
            return _chain(distribution, k, finish_and_continue(k, n))


def _balanced(plan: Plan, cluster: Cluster, payload_bytes: float) -> Expected:
    [balance] = plan.phases[0].controllers
    assert isinstance(balance, Balance)
    find, source = (queue_bounds_s, "list scheduling") if balance.queue else (bounds_s, "shares")
    lower_s, upper_s = find(balance, cluster, payload_bytes)
    if lower_s == upper_s:
        return _exact(lower_s, source, cluster.n)
    return Expected(
        seconds_per_update=upper_s, kind="upper bound", source=source, lower_s=lower_s, upper_s=upper_s, k=cluster.n
    )


@checked_types
def sync_to_async(distribution: Distribution, n: int) -> float:
    """Return the ratio of a synchronous to an asynchronous update time: ``n E[X_{n:n}] / E[X]``.

    Args:
        distribution: distribution of a compute time.
        n: number of workers, >= 1.

    >>> round(sync_to_async(Exponential(mean_s=1.0), n=8), 3), round(log_sync_to_async(n=8), 3)
    (21.743, 16.636)

    Source: Dutta et al., AISTATS 2018, Theorem 1.
    """
    return n * order_statistic(distribution, n, n) / _mean_s(distribution)


@checked_types
def log_sync_to_async(n: int) -> float:
    """Return the paper's approximation of `sync_to_async` for an exponential, ``n log(n)``: 23 % low for n = 8.

    Args:
        n: number of workers, >= 1.

    Source: Dutta et al., AISTATS 2018, Corollary 1.
    """
    return n * log_harmonic(n, n)


@checked_types
def async_to_batch_async(k: int, n: int) -> float:
    """Return the ratio of the K-async to the K-batch-async update time, for exponential times.

    ``n E[X_{K:n}] / (K E[X])``; K-sync against K-batch-sync is the same.

    Args:
        k: number K of gradients of an update, from 1 to n.
        n: number of workers, >= 1.

    >>> round(async_to_batch_async(k=4, n=8), 3), round(log_async_to_batch_async(k=4, n=8), 3)
    (1.269, 1.386)

    Source: Dutta et al., AISTATS 2018, Theorem 2.
    """
    return n * order_statistic(Exponential(mean_s=1.0), k, n) / k


@checked_types
def log_async_to_batch_async(k: int, n: int) -> float:
    """Return the paper's approximation of `async_to_batch_async`: ``n log(n / (n - K)) / K``; k below n.

    Args:
        k: number K of gradients of an update, from 1 to n - 1.
        n: number of workers, >= 1.

    Source: Dutta et al., AISTATS 2018, Theorem 2.
    """
    if k >= n:
        raise UsageError(f"k={k}, expected k below n={n}, where the approximation is finite")
    return n / k * log(n / (n - k))


def _exact(seconds: float, source: str, k: int) -> Expected:
    return Expected(seconds_per_update=seconds, kind="exact", source=source, lower_s=seconds, upper_s=seconds, k=k)


def _k_async(distribution: Distribution, k: int, n: int) -> Expected:
    if assumptions.memoryless(distribution):
        return _exact(order_statistic(distribution, k, n), "Theorem 2", k)
    if isinstance(distribution, Deterministic):
        # All workers deliver at the end of each round, which makes floor(n/k) updates.
        return _exact(distribution.value_s / (n // k), "constant", k)
    lower_s, upper_s, source = k * _mean_s(distribution) / n, order_statistic(distribution, k, k), "E[X_K:K]"
    if 2 * k > n:
        lower_s = max(lower_s, order_statistic(distribution, 2 * k - n, k))
    if assumptions.new_longer_than_used(distribution):
        upper_s, source = order_statistic(distribution, k, n), "Lemma 5"
    if assumptions.new_shorter_than_used(distribution):
        lower_s = max(lower_s, order_statistic(distribution, k, n))
    return Expected(
        seconds_per_update=upper_s, kind="upper bound", source=source, lower_s=lower_s, upper_s=upper_s, k=k
    )


def _k_batch_sync(distribution: Distribution, k: int, n: int) -> Expected:
    if k == 1:
        return _exact(order_statistic(distribution, 1, n), "Lemma 3", k)
    if assumptions.memoryless(distribution) or n == 1:
        return _exact(k * _mean_s(distribution) / n, "Erlang" if n > 1 else "Lemma 4", k)
    if isinstance(distribution, Deterministic):
        return _exact(ceil(k / n) * distribution.value_s, "constant", k)
    _check_least(distribution, n)
    lower_s, upper_s = _batch_sync_bounds(distribution, k, n)
    if k <= MOST:
        early_s, late_s = time_of_gradients(distribution, k, n)
        lower_s, upper_s = max(early_s, lower_s), min(late_s, upper_s)
    if upper_s - lower_s <= COMPUTED_WIDTH * lower_s:
        return Expected(
            seconds_per_update=(lower_s + upper_s) / 2,
            kind="computed",
            source="renewal",
            lower_s=lower_s,
            upper_s=upper_s,
            k=k,
        )
    return Expected(
        seconds_per_update=upper_s, kind="upper bound", source="renewal", lower_s=lower_s, upper_s=upper_s, k=k
    )


def _check_least(distribution: Distribution, n: int) -> None:
    try:
        order_statistic(distribution, 1, n)
    except UsageError as error:
        raise UsageError(
            f"the minimum of {n} times of {distribution} has an infinite mean, and so has the time of an update; "
            "give a lighter tail or more workers"
        ) from error


def _batch_sync_bounds(distribution: Distribution, k: int, n: int) -> tuple[float, float]:
    """Return bounds from ``n T = (k + n) E[X] - (remaining time of the n tasks when the k-th gradient arrives)``.

    This is Wald's identity over the tasks that have started; one of the n tasks is new then. K-sync is never faster.
    """
    mean_s = distribution.expectation_s
    lower_s, upper_s = order_statistic(distribution, 1, n), mean_s * (k + n - 1) / n
    if isinf(mean_s):
        return lower_s, upper_s
    if k <= n:
        upper_s = min(upper_s, order_statistic(distribution, k, n))
    if assumptions.new_longer_than_used(distribution):
        lower_s = max(lower_s, k * mean_s / n)
    if assumptions.new_shorter_than_used(distribution):
        upper_s = min(upper_s, k * mean_s / n)
    return lower_s, upper_s


def _chain(distribution: Distribution, k: int, round_trips: float) -> Expected:
    if not assumptions.memoryless(distribution):
        raise assumptions.NoTheoryError("workers that finish stale work, unless round trips are exponential")
    return _exact(round_trips * distribution.expectation_s, "Markov", k)


def _mean_s(distribution: Distribution) -> float:
    if isinf(distribution.expectation_s):
        raise UsageError(f"{distribution} has an infinite mean, and so has the time of an update; give one with a mean")
    return distribution.expectation_s
