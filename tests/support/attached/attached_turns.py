"""Attached loops of two ranks that take turns, so that a work comes too late."""

import threading
import time

from loop_parts import step
from machine_speed import scaled

LIMIT_S = scaled(10.0)


def wait_until(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def in_turns(ranks, epochs, *, until_late, held_at, until_first):
    """Return a loop in which the first work of rank 1 comes too late, and its next one before the next of rank 0.

    Args:
        ranks: ranks.
        epochs: number of epochs.
        until_late: condition, given the run and the steps of both ranks, for which rank 1 waits after its first step.
        held_at: number of the step of rank 0 after which it waits.
        until_first: condition for which it waits.
    """
    steps, has_begun = [0, 0], threading.Event()

    def turns(run, model, optimizer):
        rank = [parts[0] for parts in ranks.parts].index(model)
        waits = {1: until_late} if rank else {held_at: until_first}
        for _ in run.epochs(epochs):
            for batch in run.loader:
                if rank == 0:
                    assert has_begun.wait(LIMIT_S)
                step(model, optimizer, [batch])
                steps[rank] += 1
                if rank:
                    has_begun.set()
                if steps[rank] in waits:
                    wait_until(lambda: waits[steps[rank]](run, steps))

    return turns
