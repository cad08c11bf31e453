"""Attached loops with epochs of their own, as threads: each iteration is the next one, the last loop ends the run."""

import pytest

from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import BATCH, SAMPLES, make_parts, step
from selections import parametrize_each_once

EPOCHS, RANKS = 3, 2
BATCHES = SAMPLES // BATCH


def over_a_range(run, model, optimizer):
    return [sum(step(model, optimizer, [batch]) or 1 for batch in run.loader) for _ in range(EPOCHS)]


def by_next(run, model, optimizer):
    steps = 0
    while not run.over:
        step(model, optimizer, [next(iter(run.loader))])
        steps += 1
    return steps


@parametrize_each_once(
    kind=[AttachedThreads, AllReduceLoops],
    loop__expected=[(over_a_range, [BATCHES // RANKS] * EPOCHS), (by_next, EPOCHS * BATCHES // RANKS)],
)
def test_each_iteration_over_the_loader_is_the_next_epoch(kind, loop, expected, network, data):
    protocol = "bsp" if kind is AttachedThreads else "all_reduce"
    ranks = kind(RANKS, make_parts(network, data), protocol, stop=f"epochs={EPOCHS}")
    assert ranks.run(loop) == [expected] * RANKS


def test_the_server_ends_with_the_loop_of_the_last_rank(network, data):
    def breaking(run, model, optimizer):
        for number, batch in enumerate(run.loader):
            step(model, optimizer, [batch])
            if number == 2:
                break

    ranks = AttachedThreads(RANKS, make_parts(network, data), "bsp", stop="epochs=3")
    assert ranks.run(breaking) == [None] * RANKS
    result = ranks.server.result
    assert (result.stopped_by, result.reason) == ("stopped", "every worker has left by the end of its loop")


def test_an_iteration_without_a_batch_says_why(network, data):
    def loop(run, model, optimizer):
        next(run.epochs(1))
        batches = iter(run.loader)
        assert len(run.loader) == BATCHES // RANKS
        for _ in range(len(run.loader)):
            step(model, optimizer, [next(batches)])
        reasons = []
        for iteration in (batches, iter(run.loader)):
            with pytest.raises(StopIteration) as ended:
                next(iteration)
            reasons.append(str(ended.value))
        return reasons

    ranks = AttachedThreads(RANKS, make_parts(network, data), "bsp", stop="epochs=1")
    assert ranks.run(loop) == [["the run is over: check run.over before next()"] * 2] * RANKS
