"""Seconds per update by theory: the paper's numbers, closed forms by hand, and simulation."""

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Apply
from paceline.engines.virtual.timing import TimingEngine
from paceline.protocols.protocol import as_plan
from paceline.theory import NoTheoryError, expected, new_longer_than_used, new_shorter_than_used
from paceline.theory.assumptions import RoundTripDistribution
from paceline.theory.renewal import MOST, time_of_gradients
from paceline.theory.stale_work import finish_and_idle
from paceline.theory.survival_function import survival

P, K = 8, 4
EXPONENTIAL, CONSTANT = pl.Exponential(1.0), pl.Deterministic(1.0)
SHIFTED, PARETO = pl.ShiftedExponential(1.0, 1.0), pl.Pareto(1.0, 3.0)
HYPER = pl.HyperExponential((1.0, 11.0), (0.9, 0.1))
SIX = [pl.bsp(), pl.k_sync(K), pl.k_batch_sync(K), pl.k_async(K), pl.k_batch_async(K), pl.asp()]


def seconds(protocol, law, n=P):
    return expected(protocol, pl.Cluster(n, law)).seconds_per_update


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


@pytest.mark.parametrize("law", [EXPONENTIAL, SHIFTED, PARETO, pl.Gamma(2.0, 1.0)], ids=repr)
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


def test_all_reduce_of_gradients_is_synchronous_with_its_sum_in_every_round_trip():
    cluster = pl.Cluster(P, EXPONENTIAL, network=pl.Network(latency_s=0.25))
    theory = expected(pl.all_reduce(), cluster)
    assert (theory.kind, theory.source) == ("exact", "Lemma 3")
    assert theory.seconds_per_update == pytest.approx(761 / 280 + 2 * (P - 1) * 0.25)
    assert pl.simulate("all_reduce", cluster, updates=5_000).seconds_per_update == pytest.approx(
        theory.seconds_per_update, rel=0.02
    )


@pytest.mark.parametrize("protocol", [pl.dc_s3gd(), pl.s3gd(), pl.local_sgd(4)], ids=str)
@pytest.mark.parametrize("tells", [expected, pl.theory.staleness])
def test_update_averaging_protocols_have_no_theory(protocol, tells):
    with pytest.raises(NoTheoryError, match="whose workers take steps of their own; measure it"):
        tells(protocol, pl.Cluster(P, EXPONENTIAL))


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


@pytest.mark.parametrize(
    "protocol",
    [
        pl.ssp(2),
        pl.ringmaster(3),
        pl.ringmaster(3, stops=True),
        pl.dbw(),
        pl.adasync(),
        pl.bsp().until(updates=10) >> pl.asp(),
        pl.Protocol(3, 2, "update", name="bounded"),
        pl.Protocol("all", inf, "arrival", name="all on arrival"),
    ],
    ids=str,
)
def test_a_protocol_without_theory_is_an_error_that_names_the_simulation(protocol):
    with pytest.raises(NoTheoryError, match=r"there is no theory for .*; measure it with pl.simulate\("):
        expected(protocol, pl.Cluster(P))


@pytest.mark.parametrize(
    ("cluster", "why"),
    [
        (pl.Cluster(2, [EXPONENTIAL, SHIFTED]), "whose workers differ"),
        (pl.Cluster(2, speed=[1.0, 2.0]), "whose workers differ"),
        (pl.Cluster(2, slowdowns=[pl.Slowdown(at_s=1.0, factor=2.0, workers=0.5)]), "with slowdowns of workers"),
        (pl.Cluster(2, slowdowns=[pl.Periodic(on_s=1.0, every_s=5.0, slowdown=2.0)]), "with slowdowns of workers"),
        (pl.Cluster(2, faults=[pl.Fault(0, 3)]), "with scripted faults"),
        (pl.Cluster(2, server=pl.ServerTime(update_s=0.1)), "with server time"),
    ],
    ids=str,
)
def test_a_cluster_without_theory_is_an_error_with_the_reason(cluster, why):
    with pytest.raises(NoTheoryError, match=why):
        expected(pl.bsp(), cluster)


def test_a_list_of_equal_distributions_is_one_distribution():
    assert expected(pl.bsp(), pl.Cluster(2, [EXPONENTIAL] * 2, speed=[2.0, 2.0])).seconds_per_update == 0.75


def test_too_many_gradients_of_too_few_workers_are_refused():
    with pytest.raises(pl.UsageError, match="give k <= 8"):
        expected(pl.k_async(9), pl.Cluster(P))


@pytest.mark.parametrize("protocol", [pl.asp(), pl.k_batch_async(3)], ids=repr)
def test_distributions_without_a_mean_are_refused_if_it_is_needed(protocol):
    with pytest.raises(pl.UsageError, match="has an infinite mean, and so has the time of an update"):
        expected(protocol, pl.Cluster(P, pl.Pareto(1.0, 1.0)))


def test_distributions_without_a_mean_have_theory_if_it_is_not_needed():
    assert seconds(pl.k_sync(4), pl.Pareto(1.0, 1.0)) == pytest.approx(8 / 4)  # 8!/4! * 3!/7!


@pytest.mark.parametrize("protocol", [pl.bsp(), pl.k_async(2), pl.k_batch_async(3)], ids=repr)
@pytest.mark.parametrize("law", [CONSTANT, SHIFTED, pl.Gamma(2.0, 1.0), pl.Uniform(0.5, 1.5)], ids=repr)
def test_speed_and_network_scale_and_shift_the_distribution(protocol, law):
    network = pl.Network(latency_s=0.25, up_bytes_per_s=100)
    cluster = pl.Cluster(4, law, speed=2.0, network=network)
    theory = expected(protocol, cluster, payload_bytes=50)
    found_s = pl.simulate(protocol, cluster, updates=2_000, payload_bytes=50).seconds_per_update
    assert 0.98 * theory.lower_s <= found_s <= 1.02 * theory.upper_s
    if theory.kind == "exact":
        assert found_s == pytest.approx(theory.seconds_per_update, rel=0.02)


# -- simulation


@pytest.mark.parametrize(
    "make", [pl.k_sync, pl.k_async, pl.k_batch_sync, pl.k_batch_async], ids=lambda make: make.__name__
)
def test_constant_times_are_exact(make):
    law = pl.Deterministic(0.5)
    for n in range(1, 8):
        for k in range(1, 2 * n + 2 if "batch" in make.__name__ else n + 1):
            updates = 2 * n * max(1, n // k)  # a whole number of rounds
            found_s = pl.simulate(make(k), pl.Cluster(n, law), updates=updates).seconds_per_update
            assert found_s == pytest.approx(seconds(make(k), law, n), rel=1e-12), (n, k)


def z_of(protocol, law, n, gradients=10_000, batches=20):
    """Return theory, mean and standard error of the seconds per update from means of batches after a warm-up."""
    theory = expected(protocol, pl.Cluster(n, law))
    at_s = []
    coordinator = Coordinator(as_plan(protocol), workers=n, stop=pl.Stop(updates=gradients // theory.k))
    with TimingEngine(pl.Cluster(n, law), seed=0) as engine:
        engine.run(coordinator, lambda now, _, commands: at_s.extend(now for each in commands if type(each) is Apply))
    length = int(0.9 * len(at_s)) // batches
    means = np.diff(at_s[-1 - batches * length :: length]) / length
    return theory, means.mean(), means.std(ddof=1) / batches**0.5


EXACT_CASES = [
    *((protocol, law, 8) for protocol, law in product(SIX, [EXPONENTIAL, SHIFTED, PARETO])),
    (pl.k_batch_sync(5), SHIFTED, 2),
    (pl.k_batch_sync(16), PARETO, 32),
    (pl.k_async(16), EXPONENTIAL, 32),
    (pl.k_sync(1), pl.Pareto(1.0, 2.0), 2),
    (pl.k_batch_sync(6), pl.Uniform(0.0, 1.0), 4),
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


@pytest.mark.parametrize("law", [SHIFTED, PARETO, HYPER, pl.Uniform(0.0, 1.0), pl.Gamma(0.3, 1.0)], ids=repr)
@pytest.mark.parametrize(("k", "n"), [(2, 8), (6, 8), (7, 8), (2, 3)])
def test_the_bounds_of_k_async_hold(law, k, n):
    theory, mean, error = z_of(pl.k_async(k), law, n, gradients=8_000)
    assert theory.kind == "upper bound"
    assert theory.lower_s - 4.5 * error <= mean <= theory.upper_s + 4.5 * error
    assert theory.source == ("Lemma 5" if new_longer_than_used(law) else "E[X_K:K]")
    assert theory.seconds_per_update == theory.upper_s > theory.lower_s >= k * law.expectation_s / n


def test_lemma_5_is_not_true_of_pareto_times():
    # The bound would be broken by far, so that refusing it is not mere caution.
    theory, mean, _ = z_of(pl.k_async(32), pl.Pareto(1.0, 1.2), 64)
    assert pl.theory.order_statistic(pl.Pareto(1.0, 1.2), 32, 64) < 0.7 * mean < mean < theory.upper_s


# -- K-batch-sync: the renewal integral


def test_the_second_of_two_uniform_times():
    # Nobody is done by t with probability (1-t)**2, one worker once with 2 (1-t) (t - t**2/2): 1/3 + 1/4.
    lower_s, upper_s = time_of_gradients(pl.Uniform(0.0, 1.0), k=2, n=2)
    assert lower_s < 7 / 12 < upper_s < 1.01 * lower_s


@pytest.mark.parametrize(
    ("law", "k", "n", "expected_s"),
    [
        (EXPONENTIAL, 4, 8, 0.5),
        (EXPONENTIAL, 64, 2, 32.0),
        (PARETO, 1, 8, 24 / 23),
        (pl.Pareto(1.0, 0.5001), 1, 2, 1.0002 / 0.0002),
        (CONSTANT, 7, 3, 3.0),
        (pl.Empirical((1.0, 3.0)), 2, 2, 9 / 4),  # (1, 1): 1 s. (1, 3): 2 s or 3 s. (3, 3): 3 s
        (pl.Uniform(1.0, 1.9), 5, 7, 1 + 0.9 * 5 / 8),  # nobody is done twice before the fifth is done once
    ],
    ids=str,
)
def test_the_renewal_integral_matches_closed_forms(law, k, n, expected_s):
    lower_s, upper_s = time_of_gradients(law, k, n)
    assert lower_s * (1 - 1e-9) <= expected_s <= upper_s * (1 + 1e-9) < 1.01 * lower_s


RARE_LONG = pl.HyperExponential((0.01, 100.0), (0.99, 0.01))
MANY_DECADES = [
    (RARE_LONG, 4, 4),
    (RARE_LONG, 16, 8),
    (pl.LogNormal(1.0, 3.0), 4, 8),
    (pl.LogNormal(1.0, 3.0), 8, 4),
    (pl.Pareto(1.0, 1.1), 4, 8),
    (pl.Pareto(1.0, 1.1), 16, 4),
    (pl.Pareto(1.0, 0.8), 4, 8),
    (pl.Gamma(0.05, 1.0), 5, 5),
    (pl.Empirical((0.01, 100.0)), 5, 3),
    (RoundTripDistribution(pl.Pareto(1.0, 0.8), speed=2.0, network_s=0.5), 4, 8),
    (RoundTripDistribution(RARE_LONG, speed=2.0, network_s=0.5), 4, 8),
]


def drawn_times_of_gradients(law, k, n, runs=20_000, seed=0):
    """Return the time of the k-th gradient of each of some runs, drawn without paceline's simulation."""
    draw = np.random.default_rng(seed)
    ready_s = law.quantile(draw.random((runs, n)))
    for _ in range(k):
        first = ready_s.argmin(axis=1)[:, None]
        time_s = np.take_along_axis(ready_s, first, axis=1)
        np.put_along_axis(ready_s, first, time_s + law.quantile(draw.random((runs, 1))), axis=1)
    return time_s[:, 0]


@pytest.mark.parametrize(("law", "k", "n"), MANY_DECADES, ids=str)
def test_times_of_many_decades_have_a_narrow_bracket_around_sampled_times(law, k, n):
    lower_s, upper_s = time_of_gradients(law, k, n)
    times_s = drawn_times_of_gradients(law, k, n)
    error_s = times_s.std() / len(times_s) ** 0.5
    assert lower_s < upper_s <= 1.01 * lower_s
    assert lower_s - 4.5 * error_s <= times_s.mean() <= upper_s + 4.5 * error_s


def test_k_batch_sync_with_rare_long_times_matches_simulation():
    cluster = pl.Cluster(4, RARE_LONG)
    theory = expected(pl.k_batch_sync(4), cluster)
    assert theory.kind == "computed"
    assert theory.lower_s <= 0.0102 <= theory.upper_s <= 1.01 * theory.lower_s
    assert theory.seconds_per_update == (theory.lower_s + theory.upper_s) / 2


@settings(max_examples=25, deadline=None)
@given(
    law=st.one_of(
        st.builds(pl.LogNormal, st.just(1.0), st.floats(0.05, 8)),
        st.builds(pl.Pareto, st.just(1.0), st.floats(0.6, 5)),
        st.builds(pl.Gamma, st.floats(0.02, 20), st.just(1.0)),
        st.builds(pl.ShiftedExponential, st.floats(0, 5), st.just(1.0)),
        st.builds(lambda a, b: pl.Empirical((a, b)), st.floats(1e-6, 1), st.floats(1, 1e6)),
    ),
    k=st.integers(1, 12),
    n=st.integers(2, 9),
)
def test_every_bracket_is_narrow_and_scales_with_the_unit_of_time(law, k, n):
    lower_s, upper_s = time_of_gradients(law, k, n)
    assert 0 < lower_s <= upper_s <= 1.01 * lower_s
    assert time_of_gradients(RoundTripDistribution(law, speed=2.0**-20, network_s=0.0), k, n) == pytest.approx(
        (lower_s * 2**20, upper_s * 2**20), rel=1e-9
    )
    wald_s = law.expectation_s * (k + n - 1) / n
    assert lower_s <= wald_s
    if k == 1:
        assert lower_s * (1 - 1e-6) <= pl.theory.order_statistic(law, 1, n) <= upper_s * (1 + 1e-6)


def test_an_infinite_mean_round_trip_can_have_a_finite_mean_update():
    theory = expected(pl.k_batch_sync(4), pl.Cluster(8, pl.Pareto(1.0, 0.8)))
    assert theory.kind == "computed"
    assert theory.lower_s < 2.2012 < theory.upper_s
    with pytest.raises(pl.UsageError, match=r"minimum of 8 times of Pareto.* has an infinite mean.*or more workers"):
        expected(pl.k_batch_sync(4), pl.Cluster(8, pl.Pareto(1.0, 0.125)))
    with pytest.raises(pl.UsageError, match="has an infinite mean"):
        expected(pl.k_batch_sync(4), pl.Cluster(1, pl.Pareto(1.0, 0.8)))


@pytest.mark.parametrize("law", [SHIFTED, PARETO, HYPER, pl.Gamma(0.3, 1.0), pl.LogNormal(1.0, 2.0)], ids=repr)
def test_the_survival_function_is_the_inverse_of_the_quantile_function(law):
    class Own:
        expectation_s = law.expectation_s
        quantile = staticmethod(law.quantile)

    u = np.linspace(0.001, 0.999, 37)
    for each in (law, Own(), RoundTripDistribution(law, speed=2.0, network_s=0.25)):
        assert survival(each, each.quantile(u)) == pytest.approx(1 - u, rel=1e-6)
    assert survival(Own(), np.array([0.0]))[0] == 1


# -- backup workers that finish stale work


@pytest.mark.parametrize(
    ("make", "k", "n"),
    [(pl.backup, 1, 2), (pl.backup, 3, 8), (pl.backup, 7, 8), (pl.pull, 1, 2), (pl.pull, 3, 8), (pl.pull, 7, 3)],
)
def test_workers_that_finish_stale_work(make, k, n):
    theory, mean, error = z_of(make(k), EXPONENTIAL, n, gradients=20_000)
    assert (theory.kind, theory.source) == ("exact", "Markov")
    assert abs(mean - theory.seconds_per_update) < 4.5 * error
    assert error < 0.02 * theory.seconds_per_update
    assert seconds(make(k), pl.Exponential(3.0), n) == pytest.approx(3 * theory.seconds_per_update)


def test_backup_workers_match_hand_calculation():
    # k=1, n=2: one fresh and one stale worker. The first to finish is fresh (0.5 s), or both are fresh after it.
    assert seconds(pl.backup(1), EXPONENTIAL, 2) == 0.5 + 0.5 * 0.5
    # n=1: all gradients are fresh.
    assert seconds(pl.pull(5), EXPONENTIAL, 1) == pytest.approx(5)
    # A stale worker's fresh gradient takes two times: the last but one of one exponential and two Erlang times.
    draw = np.random.default_rng(0)
    times = np.hstack([draw.exponential(size=(200_000, 3)), draw.gamma(2.0, size=(200_000, 2))])
    third_s = np.sort(times, axis=1)[:, 2]
    assert seconds(pl.backup(3), EXPONENTIAL, 5) == pytest.approx(
        third_s.mean(), abs=4.5 * third_s.std() / 200_000**0.5
    )


def test_a_full_barrier_leaves_no_stale_work():
    assert finish_and_idle(8, 8) == pytest.approx(761 / 280, rel=1e-14)


@pytest.mark.parametrize("protocol", [pl.backup(3), pl.pull(3)], ids=str)
def test_stale_work_has_no_theory_unless_times_are_exponential(protocol):
    assert expected(protocol, pl.Cluster(8)).k == 3
    assert pl.theory.staleness(protocol, pl.Cluster(8)).mean == 0
    with pytest.raises(NoTheoryError, match="unless round trips are exponential; measure it"):
        expected(protocol, pl.Cluster(8, SHIFTED))


@pytest.mark.parametrize("law", [SHIFTED, HYPER, PARETO], ids=repr)
def test_the_bounds_of_k_batch_sync_contain_the_integral(law, monkeypatch):
    for k, n in ((6, 8), (9, 4)):
        integral = expected(pl.k_batch_sync(k), pl.Cluster(n, law))
        assert integral.kind == "computed"
        with monkeypatch.context() as patch:
            patch.setattr("paceline.theory.runtime.MOST", 1)
            bounds = expected(pl.k_batch_sync(k), pl.Cluster(n, law))
        assert bounds.kind == "upper bound"
        assert bounds.lower_s <= integral.lower_s <= integral.seconds_per_update <= integral.upper_s <= bounds.upper_s


def test_very_many_gradients_have_bounds():
    theory = expected(pl.k_batch_sync(MOST + 1), pl.Cluster(64, SHIFTED))
    found_s = pl.simulate(pl.k_batch_sync(MOST + 1), pl.Cluster(64, SHIFTED), updates=30).seconds_per_update
    assert theory.kind == "upper bound"
    assert theory.lower_s < found_s < theory.upper_s < 1.5 * theory.lower_s


# -- new longer than used


AGEING = [
    (CONSTANT, True, False),
    (pl.Uniform(0.5, 2.0), True, False),
    (EXPONENTIAL, True, True),
    (SHIFTED, True, False),
    (pl.ShiftedExponential(0.0, 1.0), True, True),
    (pl.Gamma(2.0, 1.0), True, False),
    (pl.Gamma(0.5, 1.0), False, True),
    (PARETO, False, False),
    (pl.LogNormal(1.0, 1.0), False, False),
    (HYPER, False, True),
    (pl.HyperExponential((2.0, 2.0), (0.5, 0.5)), True, True),
    (RoundTripDistribution(HYPER, speed=1.0, network_s=0.5), False, False),
    (RoundTripDistribution(pl.Gamma(2.0, 1.0), speed=2.0, network_s=0.5), True, False),
    (pl.Empirical((1.0, 1.5, 2.0)), True, False),
    (pl.Empirical((1.0, 1.0, 9.0)), False, False),
]


@pytest.mark.parametrize(("law", "longer", "shorter"), AGEING, ids=repr)
def test_new_and_used_lifetimes(law, longer, shorter):
    assert (new_longer_than_used(law), new_shorter_than_used(law)) == (longer, shorter)
    t = np.linspace(0, 12 * law.expectation_s, 481)
    beyond = survival(law, t)
    both = np.array([[beyond[i + j] for j in range(200)] for i in range(200)])
    new = np.multiply.outer(beyond[:200], beyond[:200])
    assert np.all(both <= new + 1e-9) == longer
    assert np.all(both >= new - 1e-9) == shorter


@settings(max_examples=50)
@given(values=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_measured_times_match_the_definition(values):
    def beyond(x):
        return sum(value > x for value in values) / len(values)

    halves = [i / 2 for i in range(26)]
    by_definition = all(beyond(u + t) <= beyond(u) * beyond(t) + 1e-12 for u in halves for t in halves)
    assert new_longer_than_used(pl.Empirical(tuple(map(float, values)))) == by_definition
