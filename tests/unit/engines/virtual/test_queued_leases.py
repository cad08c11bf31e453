"""Leases from a queue, simulated in arrays, against the coordinator with the timing engine, to the last bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_vectorized import by_events, by_fleet, comparable, event_by_event

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.engines.virtual.vectorized import selection
from paceline.engines.virtual.vectorized.leases import QueuedLeases, _dealt
from paceline.engines.virtual.vectorized.selection import is_exact, vectorized_simulation
from paceline.policies.shares import Pieces, deal

LAWS = [
    pl.timing.Deterministic(1.0),
    pl.timing.Empirical((1.0, 2.0, 3.0)),
    pl.timing.LogNormal(1.0, 0.3),
    pl.timing.Exponential(1.0),
    pl.timing.Pareto(1.0, 1.5),
]
PLANS = ["balanced(m=4)", "balanced(m=8, backups=false)", "balanced(m=1)", "balanced(m=3, max_share=1)"]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile the loops before a test whose processor time is limited."""
    [phase] = parse_plan("balanced(m=4)").phases
    QueuedLeases(phase.controllers[0], pl.Cluster(3, pl.timing.Exponential(1.0)), 0).run(3)
    _dealt(np.array([1.0, 2.0]), 4)


@st.composite
def clusters(draw):
    n = draw(st.sampled_from([1, 2, 3, 5, 12]))
    return pl.Cluster(
        n,
        draw(st.sampled_from(LAWS)),
        speed=draw(st.just(1.0) | st.lists(st.sampled_from([1.0, 0.5, 0.25, 2.0]), min_size=n, max_size=n)),
        network=pl.timing.Network(latency_s=draw(st.sampled_from([0.0, 0.1]))),
        server=pl.timing.ServerTime(update_s=draw(st.sampled_from([0.0, 0.25]))),
        leases=pl.timing.LeaseTime(cost_s=draw(st.sampled_from([0.0, 0.07]))),
    )


def arrays_do_what_the_coordinator_does(data):
    [phase] = parse_plan(data.draw(st.sampled_from(PLANS))).phases
    cluster, updates, seed = data.draw(clusters()), data.draw(st.integers(1, 40)), data.draw(st.integers(0, 9))

    def kind(_, *args):
        return QueuedLeases(phase.controllers[0], *args)

    assert by_fleet(kind, phase, cluster, updates, seed) == by_events(phase, cluster, updates, seed)


@settings(max_examples=40)
@given(data=st.data())
def test_arrays_equal_the_coordinator(data):
    arrays_do_what_the_coordinator_does(data)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=2_000)
@given(data=st.data())
def test_arrays_equal_the_coordinator_in_many_cases(data):
    arrays_do_what_the_coordinator_does(data)


@given(seconds=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.05, 1.0]) | st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_shares_are_those_of_the_policy(seconds):
    n = len(seconds)
    expected = deal(seconds, Pieces(8, 8, max_share=float(n)))
    assert _dealt(np.array(seconds), 8 * n).tolist() == list(expected)


def test_many_workers_are_simulated_in_arrays_with_the_same_result(monkeypatch):
    monkeypatch.setattr(selection, "QUEUE_WORKERS", 20)
    cluster = pl.Cluster(20, pl.timing.LogNormal(1.0, 0.3), leases=pl.timing.LeaseTime(cost_s=0.05))
    [phase] = parse_plan("balanced(m=8)").phases
    assert isinstance(vectorized_simulation(parse_plan("balanced(m=8)"), cluster), QueuedLeases)
    assert pl.simulate(phase, cluster, updates=30) == comparable(event_by_event(phase, cluster, 30))


def test_few_workers_and_leases_with_times_of_their_own_need_the_coordinator():
    plan = parse_plan("balanced(m=8)")
    assert vectorized_simulation(plan, pl.Cluster(100)) is None
    assert not is_exact(plan, pl.Cluster(1000, leases=pl.timing.LeaseTime(is_independent=True)))


def test_without_numba_the_coordinator_simulates(monkeypatch):
    monkeypatch.setattr(selection, "_queued_leases", lambda: None)
    assert vectorized_simulation(parse_plan("balanced(m=8)"), pl.Cluster(1000)) is None
