"""Assumptions of the theory: new-longer-than-used lifetimes, and which protocols and clusters have a closed form."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.theory import NoTheoryError, expected, new_longer_than_used, new_shorter_than_used
from paceline.theory.assumptions import RoundTripDistribution
from paceline.theory.survival_function import survival
from selections import parametrize_few
from theory_cases import CONSTANT, EXPONENTIAL, HYPER, PARETO, SHIFTED, P, seconds


@pytest.mark.parametrize(
    "protocol",
    [
        pl.ssp(2),
        pl.ringmaster(3),
        pl.ringmaster(3, stops=True),
        pl.dbw(),
        pl.adasync(),
        pl.bsp().until(updates=10) >> pl.asp(),
        pl.plans.Protocol(quorum=3, max_staleness=2, refill="update", name="bounded"),
        pl.plans.Protocol(quorum="all", max_staleness=inf, refill="arrival", name="all on arrival"),
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
        (pl.Cluster(2, slowdowns=[pl.timing.Slowdown(at_s=1.0, factor=2.0, workers=0.5)]), "with slowdowns of workers"),
        (
            pl.Cluster(2, slowdowns=[pl.timing.Periodic(on_s=1.0, every_s=5.0, slowdown=2.0)]),
            "with slowdowns of workers",
        ),
        (pl.Cluster(2, faults=[pl.Fault(worker=0, draw=3)]), "with scripted faults"),
        (pl.Cluster(2, server=pl.timing.ServerTime(update_s=0.1)), "with server time"),
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
        expected(protocol, pl.Cluster(P, pl.timing.Pareto(1.0, 1.0)))


def test_distributions_without_a_mean_have_theory_if_it_is_not_needed():
    assert seconds(pl.k_sync(4), pl.timing.Pareto(1.0, 1.0)) == pytest.approx(8 / 4)  # 8!/4! * 3!/7!


@pytest.mark.parametrize("protocol", [pl.bsp(), pl.k_async(2), pl.k_batch_async(3)], ids=repr)
@parametrize_few("law", [CONSTANT, SHIFTED, pl.timing.Gamma(2.0, 1.0), pl.timing.Uniform(0.5, 1.5)], ids=repr, keep=2)
def test_speed_and_network_scale_and_shift_the_distribution(protocol, law):
    network = pl.timing.Network(latency_s=0.25, up_bytes_per_s=100)
    cluster = pl.Cluster(4, law, speed=2.0, network=network)
    theory = expected(protocol, cluster, payload_bytes=50)
    found_s = pl.simulate(protocol, cluster, updates=2_000, payload_bytes=50).seconds_per_update
    assert 0.98 * theory.lower_s <= found_s <= 1.02 * theory.upper_s
    if theory.kind == "exact":
        assert found_s == pytest.approx(theory.seconds_per_update, rel=0.02)


# -- new longer than used
AGEING = [
    (CONSTANT, True, False),
    (pl.timing.Uniform(0.5, 2.0), True, False),
    (EXPONENTIAL, True, True),
    (SHIFTED, True, False),
    (pl.timing.ShiftedExponential(0.0, 1.0), True, True),
    (pl.timing.Gamma(2.0, 1.0), True, False),
    (pl.timing.Gamma(0.5, 1.0), False, True),
    (PARETO, False, False),
    (pl.timing.LogNormal(1.0, 1.0), False, False),
    (HYPER, False, True),
    (pl.timing.HyperExponential((2.0, 2.0), (0.5, 0.5)), True, True),
    (RoundTripDistribution(HYPER, speed=1.0, network_s=0.5), False, False),
    (RoundTripDistribution(pl.timing.Gamma(2.0, 1.0), speed=2.0, network_s=0.5), True, False),
    (pl.timing.Empirical((1.0, 1.5, 2.0)), True, False),
    (pl.timing.Empirical((1.0, 1.0, 9.0)), False, False),
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
    assert new_longer_than_used(pl.timing.Empirical(tuple(map(float, values)))) == by_definition
