"""Progress that an attached run shows to its loop."""

import threading

from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import make_network, make_parts, numbered_data, step
from rank_threads import LIMIT_S
from selections import parametrize_few


def shown(run):
    return run.update, run.workload, *run.last


def test_progress_of_bsp():
    def loop(run, model, optimizer):
        seen = []
        for _ in run.epochs(1):
            for batch in run.loader:
                seen.append(shown(run))
                step(model, optimizer, [batch])
        return [*seen, shown(run)]

    first = [(0, 0, "", 0)] + [(update, 2 * update, "used", 0) for update in range(1, 6)] + [(6, 12, "", 0)]
    assert AttachedThreads(2, make_parts(make_network(), numbered_data()), "bsp").run(loop) == [first, first]


@parametrize_few(("protocol", "fate", "staleness"), [("asp", "used", 3), ("k_sync(k=1)", "interrupted", 0)], keep=1)
def test_a_slow_rank_sees_what_became_of_its_gradient(protocol, fate, staleness):
    def loop(run, model, optimizer):
        is_slow = not order and not order.append(run)
        seen = []
        for _ in run.epochs(1):
            for batch in run.loader:
                if is_slow and not seen:
                    taken.set()
                    assert passed.wait(LIMIT_S)
                elif not is_slow:
                    assert taken.wait(LIMIT_S)  # else the other rank might begin with a later version
                seen.append(run.last)
                if is_slow and len(seen) == 2:
                    told.set()
                step(model, optimizer, [batch])
                if run.update >= 3 and not is_slow:
                    passed.set()
                    assert told.wait(LIMIT_S)  # else the other rank might find no minibatch left
        return seen[1] if is_slow else None

    order = []
    taken, passed, told = (threading.Event() for _ in range(3))
    answers = AttachedThreads(2, make_parts(make_network(), numbered_data()), protocol).run(loop)
    [slow] = [each for each in answers if each is not None]
    assert slow.fate == fate
    assert slow.staleness >= staleness


def test_progress_without_a_server():
    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for batch in run.loader:
                step(model, optimizer, [batch])
        return run.update, run.workload, run.lr

    assert AllReduceLoops(2, make_parts(make_network(), numbered_data()), "all_reduce").run(loop) == [(6, 12, 0.05)] * 2
