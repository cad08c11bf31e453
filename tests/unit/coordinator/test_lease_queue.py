"""Leases of an update from one queue: every sample once, whatever becomes of the workers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from arrivals import arrival
from coordinator_harness import coordinator
from paceline.catalogue.parser import parse_plan
from paceline.coordinator.lease_queue import LeaseQueue
from paceline.coordinator.minibatch_slices import slices_of
from paceline.core.events import (
    NOT_FINITE,
    OLD_DRAW,
    OVERFLOW,
    SKIPPED,
    Apply,
    Compute,
    Drop,
    Interrupt,
    Joined,
    Lost,
)
from paceline.errors import UsageError
from paceline.policies.controllers.base import LeaseRule

WORKERS, BATCH = 3, 8
OWN = dict.fromkeys(range(WORKERS))
SLICES = slices_of(OWN, dict.fromkeys(OWN, 1), BATCH)
RULE = LeaseRule(minibatches=WORKERS, piece=2, repeats=True)


def samples_of(lease):
    return [(each.worker, each.draw, sample) for each in lease.slices for sample in range(each.begin, each.end)]


@given(
    st.lists(st.tuples(st.integers(0, WORKERS), st.sampled_from(["ends", "is lost", "leaves"])), max_size=60),
    st.dictionaries(st.integers(0, WORKERS), st.integers(1, 6), max_size=WORKERS),
    st.booleans(),
)
def test_each_sample_is_used_once(script, shares, repeats):
    queue = LeaseQueue(SLICES, shares, BATCH, RULE._replace(repeats=repeats))
    used, has = Counter(), {}
    for worker, what in [*script, *((worker, "ends") for worker in range(WORKERS + 1) for _ in range(30))]:
        if worker not in has:
            if what == "leaves":
                queue.leave(worker)
            elif queue.has_next(worker):
                has[worker] = queue.take(worker)
        elif what == "ends":
            used.update(samples_of(has.pop(worker)))
            has.pop(queue.end(worker), None)
        else:
            del has[worker]
            queue.give_back(worker)
        queue = LeaseQueue.restored(queue.state_dict())
    assert queue.is_done
    assert not has
    assert set(used.values()) == {1}
    assert len(used) == WORKERS * BATCH


def test_a_worker_takes_its_first_lease_then_pieces_and_then_repeats_the_oldest_lease():
    queue = LeaseQueue(SLICES, {0: 8, 1: 8, 2: 6}, BATCH, RULE)
    first = [queue.take(worker) for worker in range(WORKERS)]
    assert [each.share for each in first] == [1.0, 1.0, 0.75]
    assert queue.end(1) is None
    assert samples_of(queue.take(1)) == [(2, 1, 6), (2, 1, 7)]
    assert queue.end(1) is None
    assert queue.take(1) == first[0]  # the oldest
    assert queue.end(2) is None
    assert not queue.has_next(2)  # one copy is enough
    assert queue.end(1) == 0
    assert queue.is_done


@pytest.mark.parametrize("shares", [{0: 25}, {0: 0}, {0: 20, 1: 5}], ids=str)
def test_first_leases_that_an_update_does_not_have_are_refused(shares):
    with pytest.raises(UsageError, match="in an update of 24; expected at least one sample each"):
        LeaseQueue(SLICES, shares, BATCH, RULE)


class Driven:
    """Coordinator of a protocol, of which the test says which workers deliver."""

    def __init__(self, protocol="balanced(m=4)", n=WORKERS, **knobs):
        self.coordinator = coordinator(parse_plan(protocol), n, batch_size=BATCH, **knobs)
        self.now, self.works, self.seen = 0.0, {}, []
        self._note(self.coordinator.begin())

    def _note(self, commands):
        self.seen += commands
        for command in commands:
            if isinstance(command, Compute):
                self.works[command.worker] = command
            if isinstance(command, Interrupt):
                del self.works[command.worker]
        return commands

    def handle(self, event):
        self.now += 1
        return self._note(self.coordinator.handle(event(self.now)))

    def deliver(self, worker, **measured):
        work = self.works.pop(worker)
        samples = round(BATCH * work.minibatch.share)
        return self.handle(lambda now: arrival(now, worker, work.draw, samples=samples, **measured))

    def deliver_all(self):
        """Let the workers deliver in turn until an update is made; return it."""
        while True:
            for worker in list(self.works):
                if worker in self.works:
                    for command in self.deliver(worker):
                        if isinstance(command, Apply):
                            return command

    def of(self, kind):
        return [each for each in self.seen if isinstance(each, kind)]


def samples_in(update):
    return sum(each.samples for each in update.gradients)


def test_an_update_counts_as_its_minibatches():
    driven = Driven()
    updates = [driven.deliver_all() for _ in range(3)]
    assert [samples_in(each) for each in updates] == [WORKERS * BATCH] * 3
    assert [each.workload for each in updates] == [WORKERS] * 3
    assert driven.coordinator.workload == 3 * WORKERS
    assert len(updates[0].gradients) > WORKERS


def test_the_copy_that_comes_second_is_interrupted_and_dropped():
    driven = Driven()
    while 0 not in [each.worker for each in driven.of(Interrupt)]:
        driven.deliver(1)  # takes all that is left, and then repeats the first lease of worker 0
    late = next(each for each in driven.of(Compute) if each.worker == 0)
    dropped = driven.handle(lambda now: arrival(now, 0, late.draw))
    assert [each.reason for each in dropped if isinstance(each, Drop)] == [OLD_DRAW]
    assert samples_in(driven.deliver_all()) == WORKERS * BATCH


def test_without_backups_an_update_waits_for_every_lease():
    driven = Driven("balanced(m=4, backups=false)")
    while 1 in driven.works:
        driven.deliver(1)
    assert driven.works.keys() == {0, 2}
    assert not driven.of(Interrupt)


def test_an_update_has_the_minibatches_of_the_first_workers_though_one_is_lost():
    driven = Driven()
    driven.handle(lambda now: Lost(now, 2, "unplugged"))
    del driven.works[2]
    for _ in range(3):
        update = driven.deliver_all()
        assert samples_in(update) == WORKERS * BATCH
        assert {each.worker for each in update.gradients} == {0, 1}
    driven.handle(lambda now: Joined(now, 2))
    driven.deliver(2)  # no update has to open first
    assert 2 in {each.worker for each in driven.deliver_all().gradients}


def test_an_update_may_have_the_minibatches_of_the_live_workers():
    driven = Driven("balanced(m=4, batch=live)")
    driven.handle(lambda now: Lost(now, 2, "unplugged"))
    del driven.works[2]
    assert [samples_in(driven.deliver_all()) for _ in range(2)] == [WORKERS * BATCH, 2 * BATCH]


@pytest.mark.parametrize("measured", [{}, {"skipped": True, "overflowed": True}], ids=["not finite", "overflow"])
@pytest.mark.parametrize("delivered", [(), (1,), (1, 2, 1)], ids=str)
def test_a_gradient_that_is_not_finite_skips_the_whole_update(delivered, measured):
    driven = Driven()
    for worker in delivered:
        driven.deliver(worker)
    busy = set(driven.works) - {0}
    commands = driven.deliver(0, finite=False, **measured)
    assert {each.worker for each in commands if isinstance(each, Interrupt)} == busy == {1, 2}
    [skipped] = driven.of(Apply)
    assert skipped.reason == "skipped, because the gradient of worker 0 is not finite"
    assert (skipped.is_skipped, skipped.gradients, skipped.version) == (True, (), 1)
    assert skipped.workload == driven.coordinator.workload == WORKERS
    assert [each.reason for each in driven.of(Drop)] == [OVERFLOW if measured else NOT_FINITE]
    made = driven.deliver_all()
    assert samples_in(made) == WORKERS * BATCH
    assert (made.is_skipped, made.version, driven.coordinator.workload) == (False, 2, 2 * WORKERS)
    assert {each.minibatch.slices[0].draw for each in driven.of(Compute) if each.version == 1} == {2}


def test_the_samples_of_a_lease_that_its_loop_skips_count_as_used():
    driven = Driven()
    driven.deliver(0, finite=False, skipped=True)
    update = driven.deliver_all()
    assert samples_in(update) == WORKERS * BATCH - BATCH // 2
    assert [each.reason for each in driven.of(Drop)] == [SKIPPED]


def test_an_update_of_which_the_loops_skip_all_leases_is_left_out():
    driven = Driven()
    draws = {0: 1}
    while set(draws.values()) == {1}:
        driven.deliver(next(iter(driven.works)), finite=False, skipped=True)
        draws = {worker: work.minibatch.slices[0].draw for worker, work in driven.works.items()}
    assert set(draws.values()) == {2}  # of other samples
    assert not driven.of(Apply)
    assert samples_in(driven.deliver_all()) == WORKERS * BATCH


def test_a_worker_that_others_always_overtake_gets_less():
    slow = pl.Cluster(4, pl.timing.Deterministic(0.1), speed=[1, 1, 1, 0.1])
    seconds = pl.simulate("balanced(m=8)", slow, updates=40).time_s / 40
    assert seconds < 1.2 * 0.4 / 3.1
