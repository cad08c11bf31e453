"""Round trips from leases, and the replay of a queue: against the times from which the leases were made."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.policies.estimators.replay.lease_replay import LeaseReplay
from paceline.policies.estimators.replay.lease_trips import FIRST_STRETCH, Leases, LeaseTrips, list_scheduling_s

seconds = st.floats(0.01, 100.0)
workers = st.lists(seconds, min_size=1, max_size=6)


def least_s(trips_s, pieces, minibatches):
    """Return the end of list scheduling, piece by piece."""
    free_s = [(trip_s / pieces, trip_s / pieces) for trip_s in trips_s]
    for _ in range(minibatches * pieces):
        end_s, piece_s = min(free_s)
        free_s[free_s.index((end_s, piece_s))] = (end_s + piece_s, piece_s)
    return end_s


@settings(max_examples=200, deadline=None)
@given(workers, st.integers(1, 8))
def test_pieces_end_as_in_list_scheduling(trips_s, pieces):
    n = len(trips_s)
    assert list_scheduling_s(trips_s, pieces, n) == pytest.approx(least_s(trips_s, pieces, n), rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(seconds, st.lists(st.integers(1, 4), min_size=1, max_size=4)), min_size=1), st.floats(0, 0.1))
def test_whole_round_trips_come_from_their_leases(given_leases, cost_s):
    trips = LeaseTrips(pieces=8)
    trips.begin_update(0.0)
    for worker, (trip_s, leases) in enumerate(given_leases):
        for pieces in (*leases, 8):  # of two sizes, from which the cost follows
            trips.add(worker, pieces / 8, cost_s + pieces / 8 * trip_s)
    found = trips.end_update(1.0)
    assert trips.cost_s == pytest.approx(cost_s, abs=1e-6) or all(each == [8] * len(each) for _, each in given_leases)
    for (worker, trip), (number, (trip_s, leases)) in zip(found, enumerate(given_leases), strict=True):
        assert worker == number
        half = sum(cost_s + each / 8 * trip_s for each in (*leases, 8)) / (2 * (len(leases) + 1))
        if trips.cost_s == pytest.approx(cost_s, abs=1e-6) and cost_s < half:  # a lease is not all cost
            assert trip.seconds == pytest.approx(cost_s + trip_s, rel=1e-4)


def test_a_cancelled_lease_counts_where_it_says_more():
    trips = LeaseTrips(pieces=4)
    trips.add(0, 0.5, 1.0)
    trips.add_cancelled(0, 0.5, 0.5)  # says less
    trips.add(1, 0.5, 1.0)
    trips.add_cancelled(1, 0.25, 3.0)
    trips.add_cancelled(2, 0.5, 3.0)
    found = trips.end_update(1.0)
    assert [(worker, trip.seconds, trip.censored) for worker, trip in found] == [
        (0, 2.0, False),
        (1, 12.0, True),
        (2, 6.0, True),
    ]
    assert trips.end_update(2.0) == []


def test_the_stretch_is_that_of_the_latest_updates():
    trips = LeaseTrips(pieces=4)
    assert trips.leases == Leases(4, FIRST_STRETCH)
    for now in range(41):
        trips.begin_update(float(now))
        for worker in range(2):
            trips.add(worker, 1.0, 0.5)
        trips.end_update(now + (2.0 if now < 10 else 0.75))
        assert now or trips.leases.stretch == FIRST_STRETCH, "the first leases know no speeds"
    assert trips.leases.stretch == pytest.approx(1.5)
    trips.add(0, 1.0, 0.5)
    trips.end_update(100.0)
    assert trips.leases.stretch == pytest.approx(1.5), "an update that did not begin in leases"


def test_a_replay_has_the_minibatches_of_all_workers_in_each_update():
    replay = LeaseReplay([[1.0, 2.0], [1.0]], Leases(pieces=8, stretch=1.5))
    replay.advance(5, inf)
    assert (replay.updates, replay.gradients, replay.assigned) == (3, 6, 6)
    assert replay.schedule == [(0, 0)] * 3
    times_s = [1.5 * list_scheduling_s(each, 8, 2) for each in ([1.0, 1.0], [2.0, 1.0], [1.0, 1.0])]
    assert replay.closed_s == pytest.approx([sum(times_s[:count]) for count in (1, 2, 3)])
    replay.advance(100, 8)
    assert replay.gradients == 8
    other = LeaseReplay([[1.0, 2.0], [1.0]], Leases(pieces=8, stretch=1.5))
    other.load_state_dict(replay.state_dict())
    for each in (replay, other):
        each.advance(10)
    assert other.closed_s == replay.closed_s
