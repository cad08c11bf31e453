"""Seconds per update of shares that follow the speeds, against BSP with the same draws."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

import paceline as pl
from paceline.clusters.timing.distributions import Empirical
from paceline.core.records import GradientArrived
from paceline.errors import UsageError
from paceline.policies.shares import Pieces, deal, longest
from selections import parametrize_few

BALANCED = "balanced(m=8, leases=1)"
S = 0.1  # seconds of a minibatch


def faster(cluster, updates=300, protocol=BALANCED, seeds=2):
    """Return how many times faster than BSP the updates are, a number for each seed."""
    runs = [
        [pl.simulate(each, cluster, updates=updates, seed=seed).time_s for each in ("bsp", protocol)]
        for seed in range(seeds)
    ]
    return [bsp_s / ours_s for bsp_s, ours_s in runs]


def cluster_of(speeds=(1, 1, 1, 1), sigma=0.05, **more):
    law = pl.timing.LogNormal(S, sigma) if sigma else pl.timing.Deterministic(S)
    return pl.Cluster(len(speeds), law, speed=list(speeds), **more)


def turning(turn_s, n=4, slowdown=3.0):
    return [
        pl.timing.Periodic(on_s=turn_s, every_s=n * turn_s, slowdown=slowdown, workers=(worker,), at_s=worker * turn_s)
        for worker in range(n)
    ]


@parametrize_few(
    ("speeds", "sigma", "least"),
    [
        ((1, 1, 1, 0.5), 0.0, 1.59),
        ((1, 1, 1, 0.5), 0.05, 1.55),
        ((1, 1, 1, 0.25), 0.0, 3.0),
        ((1, 1, 1, 0.25), 0.05, 2.9),
        (tuple(np.linspace(1, 1 / 3, 8)), 0.05, 1.75),
    ],
    keep=3,
)
def test_workers_that_are_always_slow(speeds, sigma, least):
    assert min(faster(cluster_of(speeds, sigma))) > least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("turn_s", "sigma", "least"), [(1.5, 0.05, 1.45), (4.5, 0.05, 1.95), (1.5, 0.3, 1.0), (4.5, 0.3, 1.45)]
)
def test_a_slow_worker_that_is_another_one_after_a_while(turn_s, sigma, least):
    assert min(faster(cluster_of(sigma=sigma, slowdowns=turning(turn_s)))) > least  # 5 or 15 updates of BSP


def test_a_lease_has_a_cost_whatever_its_samples():
    law = pl.timing.Deterministic(S)
    free, costly = (pl.Cluster(2, law, leases=pl.timing.LeaseTime(cost_s=cost_s)) for cost_s in (0.0, 0.02))
    for cluster, eighth_s in ((free, S / 8), (costly, 0.02 + 0.08 / 8)):
        trips = cluster.round_trips(seed=0)
        assert trips.duration_s(1, 1, 0.0, share=1 / 8) == pytest.approx(eighth_s)
        assert trips.times(1, 1, 0.0, share=1 / 8).compute_s == pytest.approx(eighth_s)
        assert trips.duration_s(1, 1, 0.0) == S
    noisy = {"timing": pl.timing.LogNormal(S, 0.3)}
    times_s = [pl.simulate("balanced(m=8)", replace(each, **noisy), updates=50).time_s for each in (free, costly)]
    assert times_s[1] > 1.05 * times_s[0]
    assert pl.simulate("bsp", replace(free, speed=[1, 0.5]), updates=50).time_s == pytest.approx(50 * 2 * S)


@pytest.mark.parametrize("is_independent", [False, True])
def test_the_leases_of_an_update_have_one_time_or_each_its_own(is_independent):
    leases = pl.timing.LeaseTime(is_independent=is_independent)
    cluster = pl.Cluster(4, pl.timing.LogNormal(S, 0.5), leases=leases)
    result = pl.train(pl.jobs.digits(), protocol="balanced(m=8)", cluster=cluster, stop="updates=20")
    of_a_sample_s = defaultdict(list)
    for each in result.history.of(GradientArrived):
        of_a_sample_s[each.version, each.worker].append((each.now_s - each.started_s) / each.samples)
    assert max(map(len, of_a_sample_s.values())) > 1
    assert any(max(found) - min(found) > 1e-9 for found in of_a_sample_s.values()) == is_independent


@parametrize_few("sigma", [0.3, 0.02, 0.1, 0.2], keep=1)
def test_jitter_alone_costs_nothing(sigma):
    assert min(faster(cluster_of(sigma=sigma), seeds=5)) > 0.99


def test_gradients_that_are_slow_by_chance_cost_next_to_nothing():
    often = Empirical(tuple([S] * 19 + [5 * S]))
    assert min(faster(pl.Cluster(4, often), updates=600)) > 0.98


@pytest.mark.parametrize("pieces", [4, 8, 64])
def test_constant_times_reach_the_best_division(pieces):
    speeds = (1.0, 0.9, 0.6, 0.35)
    cluster, protocol = cluster_of(speeds, 0), f"balanced(m={pieces}, leases=1)"
    first, whole = (pl.simulate(protocol, cluster, updates=updates).time_s for updates in (40, 140))
    seconds = [S / pieces / speed for speed in speeds]
    best_s = longest(deal(seconds, Pieces(pieces, pieces)), seconds)
    assert (whole - first) / 100 == pytest.approx(best_s)
    assert pl.theory.expected(pl.balanced(m=pieces, leases=1), cluster).seconds_per_update == pytest.approx(best_s)


def test_shares_change_two_updates_after_the_times_that_they_follow():
    cluster = cluster_of((1, 1, 1, 0.5), 0)
    times_s = [pl.simulate(BALANCED, cluster, updates=updates).time_s for updates in range(1, 7)]
    assert np.diff(times_s, prepend=0) == pytest.approx([2 * S] * 3 + [1.25 * S] * 3)


def test_the_network_is_no_part_of_a_share():
    with_network = cluster_of((1, 1, 1, 0.5), 0, network=pl.timing.Network(latency_s=0.02))
    slow = pl.simulate(BALANCED, with_network, updates=300).seconds_per_update
    assert slow == pytest.approx(1.25 * S + 0.04, rel=0.02)


CLUSTERS = [
    cluster_of((1, 1, 1, 0.5), 0.1),
    cluster_of((1, 0.8, 0.5), 0.3),
    cluster_of((1, 1, 1, 1), 0.2),
    pl.Cluster(4, pl.timing.Exponential(S)),
    pl.Cluster(3, pl.timing.Gamma(4, S), speed=[1, 2, 1], network=pl.timing.Network(latency_s=0.01)),
    cluster_of((1,), 0.2),
]


@parametrize_few("cluster", CLUSTERS, ids=str, keep=1)
def test_simulated_seconds_are_within_the_bounds_of_theory(cluster):
    theory = pl.theory.expected(pl.balanced(m=8, leases=1), cluster)
    seconds = pl.simulate(BALANCED, cluster, updates=4_000).seconds_per_update
    assert theory.kind == ("upper bound" if cluster.n > 1 else "exact")
    assert theory.k == cluster.n
    assert 0.98 * theory.lower_s < seconds < 1.02 * theory.upper_s
    assert pl.theory.staleness(pl.balanced(m=8, leases=1), cluster).mean == 0


def test_workers_that_are_alike_are_not_faster_than_under_bsp():
    cluster = cluster_of(sigma=0.2)
    bsp = pl.theory.expected(pl.bsp(), cluster).seconds_per_update
    assert pl.theory.expected(pl.balanced(m=8, leases=1), cluster).lower_s == pytest.approx(bsp)


def test_a_gain_that_is_too_small_leaves_shares_equal():
    cluster = cluster_of((1, 1, 1, 0.98), 0)
    theory = pl.theory.expected(pl.balanced(m=64, leases=1), cluster)
    assert theory.seconds_per_update == pl.simulate("bsp", cluster, updates=5).seconds_per_update


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        (cluster_of(slowdowns=turning(1.0)), "slowdowns of workers"),
        (
            pl.Cluster(2, [pl.timing.Exponential(1.0), pl.timing.LogNormal(1.0, 0.1)]),
            "shares of workers whose distributions differ",
        ),
        (cluster_of(faults=[pl.Fault(worker=0, draw=3)]), "scripted faults"),
    ],
)
def test_other_clusters_have_no_theory(cluster, text):
    with pytest.raises(UsageError, match=text):
        pl.theory.expected(pl.balanced(m=8, leases=1), cluster)
