"""Seconds per update by theory: the paper's numbers, closed forms by hand, and simulation."""

from itertools import product

import numpy as np
import pytest

import paceline as pl
from paceline.theory import NoTheoryError, expected, new_longer_than_used
from selections import parametrize_few
from theory_cases import CONSTANT, EXPONENTIAL, HYPER, PARETO, SHIFTED, K, P, seconds, z_of

SIX = [pl.bsp(), pl.k_sync(K), pl.k_batch_sync(K), pl.k_async(K), pl.k_batch_async(K), pl.asp()]


# -- the numbers of the paper
@pytest.mark.parametrize(
    ("protocol", "expected_s"), zip(SIX, [761 / 280, 533 / 840, 0.5, 533 / 840, 0.5, 0.125], strict=True), ids=repr
)
def test_exponential_times(protocol, expected_s):
    theory = expected(protocol, pl.Cluster(P, EXPONENTIAL))
    assert theory.seconds_per_update == pytest.approx(expected_s, rel=1e-14)
    assert theory.kind == "exact"
    assert theory.lower_s == theory.upper_s == theory.seconds_per_update
    assert theory.updates_per_s == pytest.approx(1 / expected_s)
    assert theory.gradients_per_s == pytest.approx(theory.k / expected_s)


@pytest.mark.parametrize("law", [EXPONENTIAL, SHIFTED, PARETO, pl.timing.Gamma(2.0, 1.0)], ids=repr)
def test_theorem_1_is_the_ratio_of_lemmas_3_and_4(law):
    assert pl.theory.sync_to_async(law, P) == pytest.approx(seconds(pl.bsp(), law) / seconds(pl.asp(), law))


def test_theorem_2_is_the_ratio_of_both_variants_with_batches():
    for plain, batch in ((pl.k_async, pl.k_batch_async), (pl.k_sync, pl.k_batch_sync)):
        ratio = seconds(plain(K), EXPONENTIAL) / seconds(batch(K), EXPONENTIAL)
        assert pl.theory.async_to_batch_async(K, P) == pytest.approx(ratio)


def test_logarithmic_approximations_of_the_paper_are_named_lower_bounds():
    assert pl.theory.log_sync_to_async(8) / pl.theory.sync_to_async(EXPONENTIAL, 8) == pytest.approx(0.77, abs=0.01)
    assert pl.theory.log_async_to_batch_async(4, 8) == pytest.approx(2 * np.log(2))
    with pytest.raises(pl.UsageError, match="k=8, expected k below n=8"):
        pl.theory.log_async_to_batch_async(8, 8)


@pytest.mark.slow
def test_all_reduce_of_gradients_is_synchronous_with_its_sum_in_every_round_trip():
    cluster = pl.Cluster(P, EXPONENTIAL, network=pl.timing.Network(latency_s=0.25))
    theory = expected(pl.all_reduce(), cluster)
    assert (theory.kind, theory.source) == ("exact", "Lemma 3")
    assert theory.seconds_per_update == pytest.approx(761 / 280 + 2 * (P - 1) * 0.25)
    assert pl.simulate("all_reduce", cluster, updates=5_000).seconds_per_update == pytest.approx(
        theory.seconds_per_update, rel=0.02
    )


@pytest.mark.parametrize("protocol", [pl.dc_s3gd(), pl.s3gd(), pl.local_sgd(4)], ids=str)
@pytest.mark.parametrize("function", [expected, pl.theory.staleness])
def test_update_averaging_protocols_have_no_theory(protocol, function):
    with pytest.raises(NoTheoryError, match="whose workers take steps of their own; measure it"):
        function(protocol, pl.Cluster(P, EXPONENTIAL))


# -- which protocols are which
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pl.bsp(), pl.k_sync(P)),
        (pl.bsp(), pl.k_async(P)),
        (pl.bsp(), pl.backup(P)),
        (pl.asp(), pl.k_async(1)),
        (pl.asp(), pl.k_batch_async(1)),
        (pl.k_sync(1), pl.k_batch_sync(1)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("law", [CONSTANT, PARETO], ids=repr)
def test_equivalent_protocols_have_the_same_time(one, other, law):
    assert seconds(one, law) == seconds(other, law)


# -- simulation
@parametrize_few(
    "make", [pl.k_sync, pl.k_async, pl.k_batch_sync, pl.k_batch_async], ids=lambda make: make.__name__, keep=2
)
def test_constant_times_are_exact(make):
    law = pl.timing.Deterministic(0.5)
    for n in range(1, 8):
        for k in range(1, 2 * n + 2 if "batch" in make.__name__ else n + 1):
            updates = 2 * n * max(1, n // k)  # a whole number of rounds
            found_s = pl.simulate(make(k), pl.Cluster(n, law), updates=updates).seconds_per_update
            assert found_s == pytest.approx(seconds(make(k), law, n), rel=1e-12), (n, k)


EXACT_CASES = [
    *((protocol, law, 8) for protocol, law in product(SIX, [EXPONENTIAL, SHIFTED, PARETO])),
    (pl.k_batch_sync(5), SHIFTED, 2),
    (pl.k_batch_sync(16), PARETO, 32),
    (pl.k_async(16), EXPONENTIAL, 32),
    (pl.k_sync(1), pl.timing.Pareto(1.0, 2.0), 2),
    (pl.k_batch_sync(6), pl.timing.Uniform(0.0, 1.0), 4),
]


@pytest.mark.slow
def test_theory_and_simulation_agree_within_their_errors():
    z = []
    for case in EXACT_CASES:
        theory, mean, error = z_of(*case)
        if theory.kind != "exact":
            assert theory.lower_s - 4.5 * error <= mean <= theory.upper_s + 4.5 * error, case
        else:
            z.append((mean - theory.seconds_per_update) / error)
    assert len(z) >= 16
    assert np.abs(z).max() < 4.5
    assert (np.array(z) ** 2).mean() ** 0.5 < 1.2


# -- K-async: bounds
@parametrize_few(
    "law", [SHIFTED, PARETO, HYPER, pl.timing.Uniform(0.0, 1.0), pl.timing.Gamma(0.3, 1.0)], keep=1, ids=repr
)
@parametrize_few(("k", "n"), [(2, 8), (6, 8), (7, 8), (2, 3)], keep=2)
def test_the_bounds_of_k_async_hold(law, k, n):
    theory, mean, error = z_of(pl.k_async(k), law, n, gradients=8_000)
    assert theory.kind == "upper bound"
    assert theory.lower_s - 4.5 * error <= mean <= theory.upper_s + 4.5 * error
    assert theory.source == ("Lemma 5" if new_longer_than_used(law) else "E[X_K:K]")
    assert theory.seconds_per_update == theory.upper_s > theory.lower_s >= k * law.expectation_s / n


def test_lemma_5_is_not_true_of_pareto_times():
    # The bound would be broken by far, so that refusing it is not mere caution.
    theory, mean, _ = z_of(pl.k_async(32), pl.timing.Pareto(1.0, 1.2), 64)
    assert pl.theory.order_statistic(pl.timing.Pareto(1.0, 1.2), 32, 64) < 0.7 * mean < mean < theory.upper_s
