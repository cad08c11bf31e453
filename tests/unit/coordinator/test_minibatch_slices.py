"""Shares of an update as slices of its minibatches: every sample once, also where workers are lost."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from coordinator_harness import Scripted, coordinator
from paceline.catalogue.parser import parse_plan
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.coordinator.minibatch_slices import cut
from paceline.coordinator.settings import CoordinatorSettings
from paceline.core.events import Accept, Arrival, Compute, Decision, Lost, Minibatch
from paceline.core.stop import Stop
from paceline.engines.virtual.timing import TimedWorkers
from paceline.errors import UsageError
from paceline.policies.controllers.base import SetShares
from paceline.protocols.plan_checks import checked_plan
from paceline.shares.batches import cut as cut_of_scripts

WORKERS, BATCH = 3, 6


@st.composite
def shares(draw, workers=WORKERS, batch_size=BATCH):
    """Draw shares of the samples, with at least one for each worker."""
    bounds = draw(st.sets(st.integers(1, workers * batch_size - 1), min_size=workers - 1, max_size=workers - 1))
    ends = [0, *sorted(bounds), workers * batch_size]
    return {worker: ends[worker + 1] - ends[worker] for worker in range(workers)}


def samples_of(work):
    """Return the samples of some work, as (worker or epoch, draw or number, position)."""
    for part in work.slices:
        key = (part.worker, part.draw) if part.epoch is None else (part.epoch, part.number)
        yield from ((*key, position) for position in range(part.begin, part.end))


@given(shares(), st.booleans())
def test_every_sample_of_an_update_is_dealt_once(given_shares, numbered):
    own = {worker: Minibatch(0, 1, 7 * worker) if numbered else None for worker in range(WORKERS)}
    work = cut(own, dict.fromkeys(own, 5), given_shares, BATCH)
    dealt = Counter(sample for each in work.values() for sample in samples_of(each))
    assert set(dealt.values()) == {1}
    assert len(dealt) == WORKERS * BATCH
    for worker, each in work.items():
        assert len(list(samples_of(each))) == given_shares[worker]
        assert each.share == given_shares[worker] / BATCH
        assert next(iter(each.slices)).worker == worker


@given(shares())
def test_shares_are_those_of_a_script_under_paceline_run(given_shares):
    batches = [[(worker, 5, position) for position in range(BATCH)] for worker in range(WORKERS)]
    work = cut(dict.fromkeys(range(WORKERS)), dict.fromkeys(range(WORKERS), 5), given_shares, BATCH)
    for worker in range(WORKERS):
        assert list(samples_of(work[worker])) == cut_of_scripts(batches, list(given_shares.values()), worker)


@pytest.mark.parametrize("wrong", [{0: 6, 1: 6, 2: 5}, {0: 12, 1: 6, 2: 0}, {0: 13, 1: 6, 2: -1}])
def test_shares_that_are_not_those_of_whole_minibatches_are_refused(wrong):
    with pytest.raises(UsageError, match="expected at least one sample each, and 18 in all"):
        cut(dict.fromkeys(range(WORKERS)), dict.fromkeys(range(WORKERS), 1), wrong, BATCH)


def unequal(samples):
    return (SetShares(dict(enumerate(samples)), BATCH, "as the test says"),)


def works(commands):
    return {each.worker: each.minibatch for each in commands if isinstance(each, Compute)}


def arrive_all(driven, commands, now, workers):
    """Let workers deliver the work of these commands; return the answers and the shares that have arrived."""
    draws = {each.worker: each.draw for each in commands if isinstance(each, Compute)}
    answers = []
    for worker in workers:
        now += 1
        answers += driven.handle(Arrival(now, worker, draws[worker]))
    return answers


def test_shares_hold_for_the_update_that_opens_and_are_in_the_log():
    script = Scripted(open=((), unequal((9, 6, 3)), ()))
    driven = coordinator(pl.bsp().controlled_by(script), WORKERS)
    first = driven.begin()
    second = arrive_all(driven, first, 0, range(WORKERS))
    third = arrive_all(driven, second, 10, range(WORKERS))
    assert works(first) == works(third) == {0: None, 1: None, 2: None}
    assert {worker: each.share for worker, each in works(second).items()} == {0: 1.5, 1: 1.0, 2: 0.5}
    [noted] = [each for each in second if isinstance(each, Decision) and each.kind == "shares"]
    assert (noted.reason, noted.numbers) == ("as the test says", {"0": 9.0, "1": 6.0, "2": 3.0})
    assert [each.share for each in script.seen if each.trigger == "arrival"] == [1.0] * 3 + [1.5, 1.0, 0.5]


def test_minibatches_stay_whole_where_other_workers_are_there():
    script = Scripted(open=((), unequal((9, 6, 3)), unequal((9, 6, 3))))
    driven = coordinator(pl.bsp().controlled_by(script), WORKERS)
    first = driven.begin()
    driven.handle(Lost(0.5, 2, "unplugged"))
    assert works(arrive_all(driven, first, 1, [0, 1])) == {0: None, 1: None}


def dealt_and_applied(protocol, faults, seed, per_run=30):
    """Return how many times each numbered sample was applied in a run of the data, by a controller of shares."""
    sampler = MinibatchSampler(WORKERS, per_epoch=10, partitioned=False, per_run=per_run)
    plan = checked_plan(parse_plan(protocol), WORKERS, total=per_run, per_epoch=10)
    cluster = pl.Cluster(WORKERS, pl.timing.LogNormal(1.0, 0.1), speed=[1, 0.5, 1], faults=faults)
    settings = CoordinatorSettings(per_epoch=10, batch_size=BATCH)
    driven = Coordinator(plan, workers=WORKERS, stop=Stop(epochs=3), settings=settings, minibatches=sampler)
    given, applied, unequal_work = {}, Counter(), 0

    def observe(now, event, commands):
        nonlocal unequal_work
        for command in commands:
            if isinstance(command, Accept):
                work = given[command.worker, command.draw]
                whole = [(work.epoch, work.number, position) for position in range(BATCH)]
                applied.update(samples_of(work) if work.slices else whole)
                unequal_work += bool(work.slices)
            if isinstance(command, Compute):
                given[command.worker, command.draw] = command.minibatch

    with TimedWorkers(cluster, seed).loop() as loop:
        loop.run(driven, observe)
    return applied, unequal_work


@given(
    st.lists(
        st.builds(pl.Fault, worker=st.integers(0, 2), draw=st.integers(1, 9), back_after_s=st.floats(0.1, 9)),
        max_size=5,
        unique_by=lambda fault: (fault.worker, fault.draw),
    ),
    st.integers(0, 99),
    st.sampled_from(["leases=1", "backups=true", "backups=false", "batch=live"]),
    st.sampled_from(["", "@seconds=2.3 >> asp", "@seconds=3.1 >> bsp", "@gradients=7 >> pull(k=2)"]),
)
def test_each_sample_is_applied_once_an_epoch_whatever_becomes_of_the_workers(faults, seed, option, then):
    applied, unequal_work = dealt_and_applied(f"balanced(m=6, {option}){then}", faults, seed)
    assert set(applied.values()) == {1}
    assert len(applied) == 30 * BATCH
    assert unequal_work or faults or then
