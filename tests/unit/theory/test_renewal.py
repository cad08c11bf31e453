"""The renewal integral of K-batch-sync, and backup workers that finish stale work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.theory import NoTheoryError, expected
from paceline.theory.assumptions import RoundTripDistribution
from paceline.theory.renewal import MOST, time_of_gradients
from paceline.theory.stale_work import finish_and_idle
from paceline.theory.survival_function import survival
from selections import parametrize_few
from theory_cases import CONSTANT, EXPONENTIAL, HYPER, PARETO, SHIFTED, seconds, z_of


# -- K-batch-sync: the renewal integral
def test_the_second_of_two_uniform_times():
    # No worker is done by t with probability (1-t)**2, one worker once with 2 (1-t) (t - t**2/2): 1/3 + 1/4.
    lower_s, upper_s = time_of_gradients(pl.timing.Uniform(0.0, 1.0), k=2, n=2)
    assert lower_s < 7 / 12 < upper_s < 1.01 * lower_s


@parametrize_few(
    ("law", "k", "n", "expected_s"),
    [
        (EXPONENTIAL, 4, 8, 0.5),
        (EXPONENTIAL, 64, 2, 32.0),
        (PARETO, 1, 8, 24 / 23),
        (pl.timing.Pareto(1.0, 0.5001), 1, 2, 1.0002 / 0.0002),
        (CONSTANT, 7, 3, 3.0),
        (pl.timing.Empirical((1.0, 3.0)), 2, 2, 9 / 4),  # (1, 1): 1 s. (1, 3): 2 s or 3 s. (3, 3): 3 s
        (pl.timing.Uniform(1.0, 1.9), 5, 7, 1 + 0.9 * 5 / 8),  # no worker is done twice before the fifth is done once
    ],
    ids=str,
    keep=1,
)
def test_the_renewal_integral_matches_closed_forms(law, k, n, expected_s):
    lower_s, upper_s = time_of_gradients(law, k, n)
    assert lower_s * (1 - 1e-9) <= expected_s <= upper_s * (1 + 1e-9) < 1.01 * lower_s


RARE_LONG = pl.timing.HyperExponential((0.01, 100.0), (0.99, 0.01))
MANY_DECADES = [
    (RARE_LONG, 4, 4),
    (RARE_LONG, 16, 8),
    (pl.timing.LogNormal(1.0, 3.0), 4, 8),
    (pl.timing.LogNormal(1.0, 3.0), 8, 4),
    (pl.timing.Pareto(1.0, 1.1), 4, 8),
    (pl.timing.Pareto(1.0, 1.1), 16, 4),
    (pl.timing.Pareto(1.0, 0.8), 4, 8),
    (pl.timing.Gamma(0.05, 1.0), 5, 5),
    (pl.timing.Empirical((0.01, 100.0)), 5, 3),
    (RoundTripDistribution(pl.timing.Pareto(1.0, 0.8), speed=2.0, network_s=0.5), 4, 8),
    (RoundTripDistribution(RARE_LONG, speed=2.0, network_s=0.5), 4, 8),
]


def drawn_times_of_gradients(law, k, n, runs=10_000, seed=0):
    """Return the time of the k-th gradient of each of some runs, drawn without paceline's simulation."""
    draw = np.random.default_rng(seed)
    ready_s = law.quantile(draw.random((runs, n)))
    for _ in range(k):
        first = ready_s.argmin(axis=1)[:, None]
        time_s = np.take_along_axis(ready_s, first, axis=1)
        np.put_along_axis(ready_s, first, time_s + law.quantile(draw.random((runs, 1))), axis=1)
    return time_s[:, 0]


@parametrize_few(("law", "k", "n"), MANY_DECADES, keep=1, ids=str)
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


@settings(max_examples=12, deadline=None)
@given(
    law=st.one_of(
        st.builds(pl.timing.LogNormal, st.just(1.0), st.floats(0.05, 8)),
        st.builds(pl.timing.Pareto, st.just(1.0), st.floats(0.6, 5)),
        st.builds(pl.timing.Gamma, st.floats(0.02, 20), st.just(1.0)),
        st.builds(pl.timing.ShiftedExponential, st.floats(0, 5), st.just(1.0)),
        st.builds(lambda a, b: pl.timing.Empirical((a, b)), st.floats(1e-6, 1), st.floats(1, 1e6)),
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
    theory = expected(pl.k_batch_sync(4), pl.Cluster(8, pl.timing.Pareto(1.0, 0.8)))
    assert theory.kind == "computed"
    assert theory.lower_s < 2.2012 < theory.upper_s
    with pytest.raises(pl.UsageError, match=r"minimum of 8 times of Pareto.* has an infinite mean.*or more workers"):
        expected(pl.k_batch_sync(4), pl.Cluster(8, pl.timing.Pareto(1.0, 0.125)))
    with pytest.raises(pl.UsageError, match="has an infinite mean"):
        expected(pl.k_batch_sync(4), pl.Cluster(1, pl.timing.Pareto(1.0, 0.8)))


@pytest.mark.parametrize(
    "law", [SHIFTED, PARETO, HYPER, pl.timing.Gamma(0.3, 1.0), pl.timing.LogNormal(1.0, 2.0)], ids=repr
)
def test_the_survival_function_is_the_inverse_of_the_quantile_function(law):
    class Own:
        expectation_s = law.expectation_s
        quantile = staticmethod(law.quantile)

    u = np.linspace(0.001, 0.999, 37)
    for each in (law, Own(), RoundTripDistribution(law, speed=2.0, network_s=0.25)):
        assert survival(each, each.quantile(u)) == pytest.approx(1 - u, rel=1e-6)
    assert survival(Own(), np.array([0.0]))[0] == 1


@pytest.mark.slow
# -- backup workers that finish stale work
@parametrize_few(
    ("make", "k", "n"),
    [(pl.backup, 1, 2), (pl.backup, 3, 8), (pl.backup, 7, 8), (pl.pull, 1, 2), (pl.pull, 3, 8), (pl.pull, 7, 3)],
    keep=1,
)
def test_workers_that_finish_stale_work(make, k, n):
    theory, mean, error = z_of(make(k), EXPONENTIAL, n, gradients=20_000)
    assert (theory.kind, theory.source) == ("exact", "Markov")
    assert abs(mean - theory.seconds_per_update) < 4.5 * error
    assert error < 0.02 * theory.seconds_per_update
    assert seconds(make(k), pl.timing.Exponential(3.0), n) == pytest.approx(3 * theory.seconds_per_update)


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
