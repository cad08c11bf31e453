"""Bounds on the seconds of an update whose leases are a queue, against simulations of it."""

import numpy as np
import pytest

import paceline as pl
from paceline.theory import NoTheoryError, expected
from paceline.theory.assumptions import protocol_family
from paceline.theory.order_statistics import order_statistic

UPDATES = 200
CASES = 200


def random_case(number):
    """Return a balanced protocol and a cluster for it."""
    draw = np.random.default_rng(number)
    n, pieces, spread = int(draw.integers(2, 9)), int(draw.integers(2, 17)), draw.uniform(0.02, 0.5)
    laws = [
        pl.timing.Deterministic(0.1),
        pl.timing.Gamma(1 / spread**2, 0.1),
        pl.timing.LogNormal(0.1, spread),
        pl.timing.Uniform(0.05, 0.15),
    ]
    speeds = draw.uniform(0.2, 1.0, n) if number % 3 else np.ones(n)
    return pl.balanced(m=pieces), pl.Cluster(n, laws[number % 4], speed=speeds.tolist())


def check_case(number):
    protocol, cluster = random_case(number)
    known = expected(protocol, cluster)
    mean_s = pl.simulate(protocol, cluster, updates=UPDATES, seed=number).seconds_per_update
    error = 1e-9 if isinstance(cluster.timing, pl.timing.Deterministic) else 0.02  # of the mean of 200 updates
    assert known.lower_s * (1 - error) <= mean_s <= known.upper_s * (1 + error)
    slowest_s = order_statistic(cluster.timing, cluster.n, cluster.n) / min(cluster.speed)
    assert known.upper_s - known.lower_s <= 1.01 * slowest_s / protocol.controllers[0].pieces


@pytest.mark.parametrize("number", range(4))
def test_the_interval_holds_the_mean_of_a_simulation(number):
    check_case(number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4, CASES))
def test_the_interval_holds_the_mean_of_a_simulation_in_many_cases(number):
    check_case(number)


def test_constant_times_have_the_harmonic_mean_as_their_lower_bound():
    cluster = pl.Cluster(4, pl.timing.Deterministic(0.1), speed=[1, 1, 1, 0.5])
    known = expected(pl.balanced(m=8), cluster)
    assert known.lower_s == pytest.approx(0.4 / 3.5, rel=1e-9)
    assert known.upper_s == pytest.approx(0.4 / 3.5 + 0.2 / 8, rel=1e-9)
    assert (known.kind, known.source, known.k) == ("upper bound", "list scheduling", 4)


def test_the_lower_bound_is_the_mean_of_harmonic_means():
    law, speeds = pl.timing.Gamma(4, 0.1), np.array([1.0, 0.5, 0.25])
    times = law.quantile(np.random.default_rng(0).random((400_000, 3))) / speeds
    known = expected(pl.balanced(), pl.Cluster(3, law, speed=speeds.tolist()))
    assert known.lower_s == pytest.approx((3 / (1 / times).sum(axis=1)).mean(), rel=3e-3)
    assert known.upper_s - known.lower_s == pytest.approx(times.max(axis=1).mean() / 8, rel=5e-3)


@pytest.mark.parametrize(
    "cluster",
    [
        pl.Cluster(2, network=pl.timing.Network(latency_s=0.1)),
        pl.Cluster(2, [pl.timing.Exponential(1.0), pl.timing.Exponential(2.0)]),
        pl.Cluster(2, leases=pl.timing.LeaseTime(cost_s=0.1)),
    ],
    ids=["network", "several laws", "cost of a lease"],
)
def test_what_the_theory_does_not_cover_is_refused(cluster):
    with pytest.raises(NoTheoryError):
        expected(pl.balanced(), cluster)


def test_a_queue_of_leases_is_of_the_family_of_bsp():
    assert protocol_family(pl.balanced(), 8) == protocol_family(pl.bsp(), 8)
