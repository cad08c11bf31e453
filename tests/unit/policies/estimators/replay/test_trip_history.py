from random import Random
from statistics import fmean

import pytest

from paceline.policies.estimators.replay.trip_history import Trip, TripHistory
from selections import parametrize_few


def history(trips):
    """Return the history of (worker, seconds) or (worker, seconds, censored) in this order."""
    ours = TripHistory()
    for worker, *trip in trips:
        ours.add(worker, Trip(*trip))
    return ours


def test_recent_trips_are_replayed_in_their_order():
    ours = history([(0, float(i)) for i in range(1, 13)])
    assert ours.table([0], {}) == [[float(i) for i in range(1, 13)]]


def test_without_trips_every_worker_takes_one_second():
    assert TripHistory().table([0, 1], {0: 0.3}) == [[1.0], [1.0]]


@pytest.mark.slow
def test_cancelled_trips_are_completed_without_bias():
    random = Random(0)
    ours = TripHistory()
    for _ in range(500):  # of trips of 1 s on average, those longer than 0.7 s are cancelled
        for worker in range(16):
            seconds = random.expovariate(1.0)
            ours.add(worker, Trip(min(seconds, 0.7), censored=seconds > 0.7))
    means = [fmean(trips) for trips in ours.table(range(16), {})]
    assert fmean(means) == pytest.approx(1.0, rel=0.15)


@parametrize_few("rounds", [20, 100, 800], keep=2)
def test_times_are_known_where_most_work_is_cancelled(rounds):
    random = Random(1)
    ours = TripHistory()
    alarms = 0
    for _ in range(rounds):  # the first of 16 workers interrupts the others
        times = [random.expovariate(1.0) for _ in range(16)]
        for worker, seconds in enumerate(times):
            alarms += ours.add(worker, Trip(min(times), censored=seconds > min(times)))
    means = [fmean(trips) for trips in ours.table(range(16), {})]
    assert 0.5 <= fmean(means) <= 1.5  # few trips are long, so that the tail is hardly known
    assert alarms <= rounds / 100


def test_a_cancelled_trip_takes_a_longer_one():
    [trips] = history([(0, 1.0), (0, 5.0), (0, 2.0, True), (0, 1.0), (0, 1.0), (0, 1.0), (0, 1.0), (0, 1.0)]).table(
        [0], {}
    )
    assert trips[2] == 5.0


def test_cancelled_trips_do_not_displace_completed_ones():
    completed = [(0, 1.0 + i * 11 % 32 / 100) for i in range(32)]
    ours = history([*completed, *((0, 0.1, True) for _ in range(100))])
    [trips] = ours.table([0], {})
    assert len({seconds for _, seconds in completed} & set(trips)) >= 8
    stored = [Trip(*trip) for trip in ours.state_dict()[0]["recent"]]
    assert [trip.seconds for trip in stored if not trip.censored] == [seconds for _, seconds in completed]
    weights = [trip.weight for trip in stored if trip.censored]
    assert (len(weights), sum(weights)) == (32, 100)


def test_trips_that_are_recent_no_more_take_their_cancelled_ones_along():
    ours = history([*((0, 0.1, True) for _ in range(20)), *((0, 1.0) for _ in range(33))])
    assert {Trip(*trip).censored for trip in ours.state_dict()[0]["recent"]} == {False}


def test_an_old_cancelled_trip_takes_a_longer_one_too():
    ours = history([(0, 0.1, True) if i % 2 else (0, 1.0) for i in range(200)])
    [trips] = ours.table([0], {})
    assert set(trips) == {1.0}


@pytest.mark.slow
def test_cancelled_trips_keep_their_share_of_the_old_ones():
    ours = history([(0, 0.1, i % 16 > 0) for i in range(3000)])
    old = [Trip(*trip) for trip in ours.state_dict()[0]["old"]]
    assert len(old) == 48
    assert fmean(trip.censored for trip in old) >= 0.7


def test_trips_longer_than_every_completed_one_have_a_tail():
    trips = [(worker, *trip) for worker in (0, 1) for trip in [(1.0,)] * 4 + [(2.0, True)] * 4]
    first, second = history(trips).table([0, 1], {})
    assert len(set(first[4:] + second[4:])) == 8
    assert min(first[4:]) > 2.0


def test_a_worker_whose_work_is_always_cancelled_has_changed():
    after = []
    for seed in range(20):
        random = Random(seed)
        ours = TripHistory()
        for _ in range(100):
            ours.add(0, Trip(random.uniform(0.8, 1.2)))
        changed = [ours.add(0, Trip(random.uniform(1.0, 1.2), censored=True)) for _ in range(20)]
        after.append(changed.index(True))
        assert sum(not Trip(*trip).censored for trip in ours.state_dict()[0]["recent"]) <= 4  # of 100 from before
    assert 5 <= fmean(after) <= 8


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_times_that_never_vary_do_not_change(seconds):
    ours = TripHistory()
    assert not any(ours.add(0, Trip(seconds)) for _ in range(200))


@pytest.mark.slow
def test_a_worker_whose_work_is_often_cancelled_has_not_changed():
    random = Random(5)
    ours = TripHistory()
    alarms = 0
    for _ in range(5000):  # the median of uniform times cancels half of them
        seconds = random.uniform(0.8, 1.2)
        alarms += ours.add(0, Trip(min(seconds, 1.0), censored=seconds > 1.0))
    assert alarms <= 10


def test_work_in_flight_that_takes_longer_than_any_trip_counts():
    ours = history([(worker, 1.0) for worker in (0, 1) for _ in range(8)])
    slow, fast = ours.table([0, 1], {0: 9.0, 1: 0.5})
    assert max(slow) > 9.0
    assert fast == [1.0] * 8


def test_a_worker_with_few_trips_gets_those_of_the_others_at_its_own_speed():
    trips = [(worker, 1.0 + 0.01 * i) for i in range(8) for worker in (0, 1, 2)]
    alike, slow = history([*trips, (3, 1.0), (3, 1.07)]), history([*trips, (3, 5.0), (3, 5.35)])
    assert fmean(alike.table(range(4), {})[3]) == pytest.approx(1.035, rel=0.05)
    assert fmean(slow.table(range(4), {})[3]) == pytest.approx(5.2, rel=0.1)


def test_a_fast_worker_makes_the_trips_of_the_others_neither_faster_nor_more_random():
    ours = history([*[(0, 0.1)] * 9, (1, 0.9), (1, 1.1), (2, 1.0)])
    _, *others = ours.table([0, 1, 2], {})
    assert all(0.8 < seconds < 1.25 for trips in others for seconds in trips)


def test_slowness_that_is_rare_is_not_forgotten():
    before = [(worker, 30.0 if i % 25 == worker else 1.0) for i in range(200) for worker in range(16)]
    ours = history([*before, *((worker, 1.0) for _ in range(40) for worker in range(16))])
    trips = [seconds for own in ours.table(range(16), {}) for seconds in own]
    assert 0.001 <= trips.count(30.0) / len(trips) <= 0.02  # a tenth of 1 / 25


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_change_of_the_times_is_detected_and_old_trips_are_left_out(factor):
    random = Random(1)
    ours = TripHistory()
    assert not any(ours.add(0, Trip(random.uniform(0.8, 1.2))) for _ in range(200))
    changed = [ours.add(0, Trip(factor * random.uniform(0.8, 1.2))) for _ in range(10)]
    assert changed.index(True) <= 3
    [trips] = ours.table([0], {})
    recent = [each for each in trips if (each > 2.5) == (factor > 1)]
    assert len(recent) >= 0.6 * len(trips)


def test_one_outlier_is_no_change():
    random = Random(2)
    trips = [random.uniform(0.8, 1.2) for _ in range(100)]
    trips[50] = 100.0
    ours = TripHistory()
    assert not any(ours.add(0, Trip(each)) for each in trips)


def test_a_history_goes_on_from_its_state():
    random = Random(3)
    first, second = TripHistory(), TripHistory()
    for i in range(300):
        first.add(i % 3, Trip(random.expovariate(1.0), censored=i % 7 == 0))
    for _ in range(4):
        first.add(2, Trip(2.0, censored=True))  # on the way to a change
    second.load_state_dict(first.state_dict())
    for i in range(60):
        trip = Trip(random.expovariate(0.2), censored=i % 3 == 2)
        assert first.add(i % 3, trip) == second.add(i % 3, trip)
    assert first.table(range(3), {1: 4.0}) == second.table(range(3), {1: 4.0})
    assert first.state_dict() == second.state_dict()
