"""Reserves of minibatches: exact forecasts, every minibatch once, no worker without data at the end."""

import copy
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline import Stop
from paceline.catalogue.parser import parse_plan
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.core.events import Arrival, Compute, Lost, Minibatch

N = 3
happenings = st.lists(
    st.tuples(st.sampled_from(["take", "take", "apply", "apply", "return", "lose", "save"]), st.integers(0, N - 1)),
    max_size=60,
)


def sampler(ahead, per_epoch=5, per_run=None):
    return MinibatchSampler(N, per_epoch=per_epoch, partitioned=False, per_run=per_run, ahead=ahead)


@given(ahead=st.integers(0, 4), per_epoch=st.integers(1, 7), epochs=st.integers(1, 3), steps=happenings)
def test_every_minibatch_is_applied_exactly_once_and_no_worker_is_without_data(ahead, per_epoch, epochs, steps):
    minibatches, in_flight, applied = sampler(ahead, per_epoch, epochs * per_epoch), {}, Counter()

    def take(worker):
        if worker not in in_flight:
            left = per_epoch * epochs - applied.total() - len(in_flight)
            assert minibatches.has_next(worker) == (left > 0) != minibatches.are_used_up
            if left:
                in_flight[worker] = minibatches.next(worker)

    for what, worker in steps:
        match what:
            case "take":
                take(worker)
            case "apply" if worker in in_flight:
                applied[in_flight.pop(worker)] += 1
            case "return" | "lose" if worker in in_flight:
                minibatches.put_back(in_flight.pop(worker))
            case "save":
                restored = sampler(ahead, per_epoch, epochs * per_epoch)
                restored.load_state_dict(copy.deepcopy(minibatches.state_dict()))
                minibatches = restored
        if what == "lose":
            minibatches.release(worker)
            assert not minibatches.upcoming(worker)
    while not minibatches.are_used_up or in_flight:
        take(0)  # the other workers are slow
        applied.update(each for worker in list(in_flight) for each in [in_flight.pop(worker)])
    assert applied == {Minibatch(0, epoch, number): 1 for epoch in range(epochs) for number in range(per_epoch)}


@given(ahead=st.integers(1, 4), turns=st.lists(st.integers(0, N - 1), max_size=30))
def test_the_reserve_is_the_sequence_that_the_worker_gets_while_data_are_left(ahead, turns):
    minibatches, forecast = sampler(ahead), {}
    for worker in turns:
        minibatch = minibatches.next(worker)
        assert forecast.get(worker, (minibatch,))[0] == minibatch
        upcoming = minibatches.upcoming(worker)
        assert upcoming[:-1] == forecast.get(worker, (None, *upcoming[:-1]))[1:]
        assert len(upcoming) == ahead
        forecast[worker] = upcoming


def test_at_the_end_a_worker_takes_the_newest_minibatch_of_the_longest_reserve():
    minibatches = sampler(2, per_epoch=5, per_run=5)
    assert minibatches.next(0).number == 0
    assert minibatches.next(1).number == 3
    assert [each.number for each in minibatches.upcoming(0)] == [1, 2]
    assert [each.number for each in minibatches.upcoming(1)] == [4]
    assert [minibatches.next(2).number for _ in range(2)] == [2, 1]
    assert not minibatches.upcoming(0)
    assert minibatches.next(0).number == 4
    assert minibatches.are_used_up


def test_one_worker_with_a_reserve_takes_the_same_sequence_as_one_without():
    with_reserve, without = sampler(3, per_epoch=5, per_run=10), sampler(0, per_epoch=5, per_run=10)
    assert [with_reserve.next(0) for _ in range(10)] == [without.next(0) for _ in range(10)]


def test_the_reserve_of_a_lost_worker_is_dealt_to_the_others():
    coordinator = Coordinator(parse_plan("asp"), workers=2, stop=Stop(updates=9), minibatches=sampler(2))
    assert [each.upcoming for each in coordinator.begin() if computes(each)] == [numbers(1, 2), numbers(4, 5)]
    coordinator.handle(Lost(1.0, 0, "gone"))
    taken = [each for draw in range(1, 6) for each in coordinator.handle(Arrival(2.0, 1, draw)) if computes(each)]
    assert tuple(each.minibatch for each in taken) == numbers(4, 5, 0, 1, 2)


def numbers(*of_run):
    return tuple(Minibatch(0, *divmod(number, 5)) for number in of_run)


def computes(command):
    return isinstance(command, Compute)
