"""Learnt hazards against distributions whose arrivals are known."""

from itertools import pairwise
from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.codec import decode, encode
from paceline.policies.estimators.arrivals.arrival_hazards import ArrivalHazards


def learnt(trips, workers):
    """Return the hazards learnt from (worker, seconds, arrived), with a fit after each round of all workers."""
    hazards = ArrivalHazards()
    for i, (worker, seconds, arrived) in enumerate(trips, start=1):
        hazards.add(worker, seconds, arrived)
        if i % workers == 0:
            hazards.fit(range(workers))
    return hazards


def cut(seconds, limit_s):
    return (min(seconds, limit_s), seconds <= limit_s)


def test_cancelled_exponential_trips_have_the_hazard_of_their_distribution():
    random = Random(1)
    trips = [(i % 16, *cut(random.expovariate(0.5), 1.0)) for i in range(16 * 200)]
    hazards = learnt(trips, 16)
    for elapsed_s in (0.0, 0.4):
        [found] = hazards.arrivals(range(16), [elapsed_s] * 16, [0.5])
        assert found == pytest.approx(16 * (1 - exp(-0.25)), rel=0.12)
    assert hazards.mean_trip_s == pytest.approx(2.0, rel=0.12)


def test_steady_times_arrive_when_they_always_did():
    random = Random(2)
    hazards = learnt([(i % 4, random.uniform(0.98, 1.02), True) for i in range(200)], 4)
    before, after = hazards.arrivals(range(4), [0.5] * 4, [0.4, 0.6])
    assert before < 0.1
    assert after > 3.9


def test_a_worker_that_is_always_cancelled_is_not_expected():
    random = Random(3)
    trips = [(i % 16, 1.2, False) if i % 16 == 0 else (i % 16, random.gauss(1, 0.1), True) for i in range(16 * 40)]
    hazards = learnt(trips, 16)
    assert hazards.arrivals([0], [0.0], [1.2])[0] < 0.15
    assert hazards.arrivals([1], [0.0], [1.2])[0] > 0.9


def test_a_worker_with_few_trips_is_like_the_others():
    random = Random(4)
    hazards = learnt([(i % 15, random.gauss(1, 0.1), True) for i in range(15 * 40)], 15)
    assert not hazards.knows(15)
    hazards.fit(range(16))
    assert hazards.arrivals([15], [0.0], [1.2])[0] == pytest.approx(hazards.arrivals([1], [0.0], [1.2])[0], abs=0.05)


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_change_of_all_workers_is_learnt_within_a_few_rounds(factor):
    random = Random(5)
    steady = [(i % 16, random.gauss(1, 0.2), True) for i in range(16 * 60)]
    changed = [(i % 16, factor * random.gauss(1, 0.2), True) for i in range(16 * 6)]
    hazards = learnt(steady + changed, 16)
    early, late = hazards.arrivals(range(16), [0.0] * 16, [0.4 * factor, 1.6 * factor])
    assert early < 4
    assert late > 13


def test_no_trip_or_no_arrival_gives_no_fit():
    hazards = ArrivalHazards()
    hazards.fit([0])
    hazards.add(0, 1.0, arrived=False)
    hazards.fit([0])
    assert hazards.mean_trip_s == 0
    assert not hazards.knows(0)


TRIPS = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e7), st.booleans()), min_size=1, max_size=20)


@given(TRIPS, st.lists(st.floats(0, 1e7), min_size=4, max_size=4))
def test_expected_arrivals_grow_with_the_horizon_up_to_all_workers(trips, elapsed_s):
    hazards = learnt([*trips, (0, 1.0, True)], 4)
    hazards.fit(range(4))
    found = [0.0, *hazards.arrivals(range(4), elapsed_s, [1e-6, 1e-3, 1.0, 1e3, 1e6]), 4.0]
    assert all(before <= after + 1e-12 for before, after in pairwise(found))


@given(TRIPS, TRIPS)
def test_a_restored_estimator_goes_on_alike(before, after):
    ours, restored = learnt([(0, 1.0, True), *before], 4), ArrivalHazards()
    restored.load_state_dict(decode(encode(ours.state_dict(), {}), {}))
    for each in (ours, restored):
        for trip in after:
            each.add(*trip)
        each.fit(range(4))
    first, second = (each.arrivals(range(4), [0.5] * 4, [0.1, 10.0]).tolist() for each in (ours, restored))
    assert first == second


def test_the_detector_of_changes_goes_on_from_its_state():
    ours, restored = learnt([(0, 1.0, True)] * 64, 1), ArrivalHazards()
    ours.fit([0])
    for _ in range(5):
        ours.add(0, 9.0, False)
    restored.load_state_dict(decode(encode(ours.state_dict(), {}), {}))
    for each in (ours, restored):
        for _ in range(12):  # enough for an alarm after the first five only
            each.add(0, 9.0, False)
        each.fit([0])
    assert restored.mean_trip_s == ours.mean_trip_s > 50
