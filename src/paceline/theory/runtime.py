"""Expected seconds per update of a protocol, each with the lemma that it is from."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, isinf, log
from typing import Literal

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing import Deterministic, Distribution, Exponential
from paceline.errors import UsageError
from paceline.protocols.protocol import Phase, Plan, Protocol, as_plan
from paceline.theory.assumptions import (
    Name,
    NoTheoryError,
    memoryless,
    new_longer_than_used,
    new_shorter_than_used,
    recognise,
    round_trip,
)
from paceline.theory.order_statistics import log_harmonic, order_statistic
from paceline.theory.renewal import MOST, time_of_gradients
from paceline.theory.stale_work import finish_and_continue, finish_and_idle
from paceline.utils.argument_types import checked_types

Kind = Literal["exact", "computed", "upper bound"]
COMPUTED_WIDTH = 0.01


@dataclass(frozen=True)
class Expected:
    """Expected seconds per update in the long run.

    Attributes:
        seconds_per_update: the expectation if the kind is "exact"; if "computed", the middle of bounds that are at most
            1 % apart; else the upper bound.
        kind: how good that is.
        source: the lemma or theorem.
        lower_s: a lower bound on the expectation, in seconds.
        upper_s: an upper bound on it.
        k: gradients of an update.
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
        """Gradients per second that enter an update."""
        return self.k / self.seconds_per_update


@checked_types
def expected(protocol: Protocol | Phase | Plan, cluster: Cluster, payload_bytes: float = 0) -> Expected:
    """Return the expected seconds per update of a protocol, in the long run.

    Round trips are independent and of one law X, n workers, K gradients an update:

    - K-sync, and synchronous for K = n: E[X_{K:n}] (Lemma 3). All-reduce of gradients is that, with its sum in X.
    - K-batch-async, and asynchronous for K = 1: K E[X] / n (Lemma 4).
    - K-batch-sync: K E[X] / n for an exponential, ceil(K/n) times a constant one, and the renewal integral for others,
      computed to bounds that are at most 1 % apart.
    - K-async: E[X_{K:n}] for an exponential (Theorem 2), 1 / floor(n/K) of a constant one, and bounds for others.
    - Backup workers that finish stale work, `backup` (Push & Wait) and `pull`: a Markov chain, for an exponential.

    Args:
        protocol: any whose knobs are one of these.
        cluster: simulated, of alike workers.
        payload_bytes: size of the parameters, and of a gradient, for its network.

    Raises:
        NoTheoryError: the protocol or the cluster is another one; a simulation is offered.
        UsageError: the expectation is infinite, or n workers can never fill the quorum. The expectation of K-batch-sync
            is infinite where E[X_{1:n}] is: for Pareto times of a shape of at most 1/n.

    >>> from paceline.catalogue.protocols import bsp, k_async
    >>> from paceline.clusters.timing import Uniform
    >>> expected(bsp(), Cluster(2))
    Expected(seconds_per_update=1.5, kind='exact', source='Lemma 3', lower_s=1.5, upper_s=1.5, k=2)
    >>> expected(k_async(k=2), Cluster(4, Uniform(0.0, 1.0))).kind
    'upper bound'

    Source: Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018, Sect. 4.

    Differs from the paper: Lemma 5 has only an upper bound for K-async, for laws that are new longer than used. For any
    law the time is between K E[X] / n (nobody brings more than a gradient each E[X]) and E[X_{K:K}] (the K workers that
    began anew are enough), and not below E[X_{2K-n:K}] (the others bring at most n - K of the gradients); where new
    work is shorter than used, Lemma 5 turns round. K-batch-sync is computed, for K up to 256.
    """
    known, n = recognise(protocol, cluster.n), cluster.n
    law = round_trip(cluster, payload_bytes, has_server=as_plan(protocol).reduction is None)
    return _RUNTIMES[known.name](law, known.k, n)


@checked_types
def sync_to_async(law: Distribution, n: int) -> float:
    """Return how many times longer a synchronous update takes than an asynchronous one: ``n E[X_{n:n}] / E[X]``.

    >>> round(sync_to_async(Exponential(mean_s=1.0), n=8), 3), round(log_sync_to_async(n=8), 3)
    (21.743, 16.636)

    Source: Dutta et al., AISTATS 2018, Theorem 1.
    """
    return n * order_statistic(law, n, n) / _mean_s(law)


@checked_types
def log_sync_to_async(n: int) -> float:
    """Return the paper's approximation of `sync_to_async` for an exponential, ``n log(n)``: 23 % low for n = 8.

    Source: Dutta et al., AISTATS 2018, Corollary 1.
    """
    return n * log_harmonic(n, n)


@checked_types
def async_to_batch_async(k: int, n: int) -> float:
    """Return how many times longer K-async takes than K-batch-async, for exponential times.

    ``n E[X_{K:n}] / (K E[X])``; K-sync against K-batch-sync is the same.

    >>> round(async_to_batch_async(k=4, n=8), 3), round(log_async_to_batch_async(k=4, n=8), 3)
    (1.269, 1.386)

    Source: Dutta et al., AISTATS 2018, Theorem 2.
    """
    return n * order_statistic(Exponential(mean_s=1.0), k, n) / k


@checked_types
def log_async_to_batch_async(k: int, n: int) -> float:
    """Return the paper's approximation of `async_to_batch_async`: ``n log(n / (n - K)) / K``; k below n.

    Source: Dutta et al., AISTATS 2018, Theorem 2.
    """
    if k >= n:
        raise UsageError(f"k = {k}, expected one below n = {n}: the approximation is infinite there")
    return n / k * log(n / (n - k))


def _exact(seconds: float, source: str, k: int) -> Expected:
    return Expected(seconds, "exact", source, seconds, seconds, k)


def _k_sync(law: Distribution, k: int, n: int) -> Expected:
    return _exact(order_statistic(law, k, n), "Lemma 3", k)


def _k_batch_async(law: Distribution, k: int, n: int) -> Expected:
    return _exact(k * _mean_s(law) / n, "Lemma 4", k)


def _k_async(law: Distribution, k: int, n: int) -> Expected:
    if memoryless(law):
        return _exact(order_statistic(law, k, n), "Theorem 2", k)
    if isinstance(
        law, Deterministic
    ):  # each worker delivers once a round, all at its end, and makes floor(n/k) updates
        return _exact(law.value_s / (n // k), "constant", k)
    lower_s, upper_s, source = k * _mean_s(law) / n, order_statistic(law, k, k), "E[X_K:K]"
    if 2 * k > n:
        lower_s = max(lower_s, order_statistic(law, 2 * k - n, k))
    if new_longer_than_used(law):
        upper_s, source = order_statistic(law, k, n), "Lemma 5"
    if new_shorter_than_used(law):
        lower_s = max(lower_s, order_statistic(law, k, n))
    return Expected(upper_s, "upper bound", source, lower_s, upper_s, k)


def _k_batch_sync(law: Distribution, k: int, n: int) -> Expected:
    if k == 1:
        return _exact(order_statistic(law, 1, n), "Lemma 3", k)
    if memoryless(law) or n == 1:
        return _exact(k * _mean_s(law) / n, "Erlang" if n > 1 else "Lemma 4", k)
    if isinstance(law, Deterministic):
        return _exact(ceil(k / n) * law.value_s, "constant", k)
    _check_least(law, n)
    lower_s, upper_s = _batch_sync_bounds(law, k, n)
    if k <= MOST:
        early_s, late_s = time_of_gradients(law, k, n)
        lower_s, upper_s = max(early_s, lower_s), min(late_s, upper_s)
    if upper_s - lower_s <= COMPUTED_WIDTH * lower_s:
        return Expected((lower_s + upper_s) / 2, "computed", "renewal", lower_s, upper_s, k)
    return Expected(upper_s, "upper bound", "renewal", lower_s, upper_s, k)


def _check_least(law: Distribution, n: int) -> None:
    try:
        order_statistic(law, 1, n)
    except UsageError as error:
        raise UsageError(
            f"the first of {n} times of {law} has an infinite mean, and so has the time of an update; "
            "give a lighter tail or more workers"
        ) from error


def _batch_sync_bounds(law: Distribution, k: int, n: int) -> tuple[float, float]:
    """Return bounds from ``n T = (k + n) E[X] - (what is left of the n pieces of work when the k-th is done)``.

    That is Wald's identity over the work begun; one of the n pieces is new then. And K-sync is never faster.
    """
    mean_s = law.expectation_s
    lower_s, upper_s = order_statistic(law, 1, n), mean_s * (k + n - 1) / n
    if k <= n and not isinf(mean_s):
        upper_s = min(upper_s, order_statistic(law, k, n))
    if isinf(mean_s):
        return lower_s, upper_s
    if new_longer_than_used(law):
        lower_s = max(lower_s, k * mean_s / n)
    if new_shorter_than_used(law):
        upper_s = min(upper_s, k * mean_s / n)
    return lower_s, upper_s


def _backup(law: Distribution, k: int, n: int) -> Expected:
    return _chain(law, k, finish_and_idle(k, n))


def _pull(law: Distribution, k: int, n: int) -> Expected:
    return _chain(law, k, finish_and_continue(k, n))


def _chain(law: Distribution, k: int, round_trips: float) -> Expected:
    if not memoryless(law):
        raise NoTheoryError("workers that finish stale work, unless round trips are exponential")
    return _exact(round_trips * law.expectation_s, "Markov", k)


def _mean_s(law: Distribution) -> float:
    if isinf(law.expectation_s):
        raise UsageError(f"{law} has an infinite mean, and so has the time of an update; give a law with a mean")
    return law.expectation_s


_RUNTIMES: dict[Name, Callable[[Distribution, int, int], Expected]] = {
    "k_sync": _k_sync,
    "k_async": _k_async,
    "k_batch_sync": _k_batch_sync,
    "k_batch_async": _k_batch_async,
    "backup": _backup,
    "pull": _pull,
}
