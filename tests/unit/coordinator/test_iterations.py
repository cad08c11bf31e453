"""Iterations of loops with several optimizers: whatever is late or lost, the updates have the order of one loop."""

from itertools import cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrivals import arrival
from coordinator_harness import coordinator
from paceline.catalogue.parser import parse_plan
from paceline.checkpoint.codec import encode
from paceline.coordinator.admission import AFTER_LAST_ITERATION, NO_BATCH, OTHER_STEP
from paceline.coordinator.iterations import KEPT, Iterations
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.coordinator.pending_update import PendingUpdate
from paceline.core.events import Accept, Apply, Compute, Drop, EndRun, Interrupt, Joined, Lost
from paceline.core.gradient import NO_STEP, StepPlace

WORKERS = 4
CYCLES = {
    "GAN": [(2, 1, 1), (1, 1, 2)],
    "WGAN": [(2, 1, 1), (2, 2, 1), (2, 3, 1), (1, 1, 2)],
    "three optimizers": [(1, 1, 1), (2, 1, 2), (1, 1, 3), (3, 1, 4)],
}


class Loops:
    """Loops of all workers, of which each hands in the steps of a cycle.

    Args:
        coordinator: coordinator of the run.
        steps: cycle of the loops; its first step draws a batch.
    """

    def __init__(self, coordinator, steps):
        self.coordinator = coordinator
        self.steps = [StepPlace(*each) for each in steps]
        self.places = [0] * WORKERS
        self.tasks = {}
        self.updates, self.reasons, self.end, self.now = [], [], None, 0.0
        self.accepted = []
        self.carry_out(coordinator.begin())

    def carry_out(self, commands):
        for command in commands:
            match command:
                case Compute():
                    self.tasks[command.worker] = command
                case Interrupt():
                    self.tasks.pop(command.worker, None)
                case Accept():
                    self.accepted.append(command.step_place)
                case Drop():
                    self.reasons.append(command.reason)
                case Apply():
                    self.updates.append(self.accepted)
                    self.accepted = []
                case EndRun():
                    self.end = command

    def handle(self, event, **about):
        self.now += 1.0
        self.carry_out(self.coordinator.handle(event(now=self.now, **about)))

    def hand_in(self, worker, **measured):
        """Let the loop of a worker that has a task make its next step."""
        task = self.tasks.pop(worker)
        place = self.places[worker] % len(self.steps)
        self.places[worker] += 1
        step = self.steps[place]
        given = {"step_place": step, "minibatches": int(step.position == 1), **measured}
        self.handle(arrival, worker=worker, draw=task.draw, **given)

    def wait(self, worker):
        """Let the loop of a worker ask for a batch."""
        task = self.tasks.pop(worker)
        self.handle(arrival, worker=worker, draw=task.draw, step_place=NO_STEP, finite=False, skipped=True)


def loops(protocol, cycle="GAN", stop=None, **parts):
    made = coordinator(parse_plan(protocol), WORKERS, stop=stop or {"updates": 40}, **parts)
    return Loops(made, CYCLES[cycle])


actions = st.tuples(st.integers(0, WORKERS - 1), st.sampled_from(["hands in", "hands in", "hands in", "dies", "skips"]))


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(CYCLES)),
    st.sampled_from(["bsp", "k_sync(k=2)", "k_sync(k=1)", "backup(k=1)"]),
    st.lists(actions, max_size=80),
)
def test_the_updates_are_in_the_order_of_one_loop(cycle_name, protocol, script):
    run = loops(protocol, cycle_name)
    is_first_cycle = len(CYCLES[cycle_name])
    for worker, what in script:
        if run.end is not None:
            break
        if what == "dies" and len(run.updates) > is_first_cycle:
            run.tasks.pop(worker, None)
            run.handle(Lost, worker=worker, reason="it was killed")
            run.places[worker] = 0
            run.handle(Joined, worker=worker)
        elif what == "skips" and worker in run.tasks:
            run.hand_in(worker, finite=False, skipped=True, overflowed=True)
        elif worker in run.tasks:
            run.hand_in(worker)
    encode(run.coordinator.state_dict(), {})  # a checkpoint may hold a part of an update
    for worker in cycle(range(WORKERS)):
        if run.end is not None:
            break
        assert run.tasks, "no worker has a task"
        if worker in run.tasks:
            run.hand_in(worker)
    assert all(len(set(each)) == 1 for each in run.updates)


@pytest.mark.parametrize("protocol", ["bsp", "k_sync(k=2)", "k_sync(k=3)", "backup(k=1)"])
@pytest.mark.parametrize("cycle_name", CYCLES)
@given(st.lists(st.integers(0, WORKERS - 1), max_size=120))
def test_late_workers_change_no_order(protocol, cycle_name, order):
    run = loops(protocol, cycle_name)
    for worker in [*order, *islice(cycle(range(WORKERS)), 400)]:
        if worker in run.tasks and run.end is None:
            run.hand_in(worker)
    assert len(run.updates) == 40
    assert [each[0] for each in run.updates] == list(islice(cycle(run.steps), 40))


def test_a_worker_that_joins_hands_in_a_step_of_the_others():
    run = loops("bsp", "WGAN")
    for _ in range(6):  # two steps into the second iteration
        for worker in range(WORKERS):
            run.hand_in(worker)
    run.tasks.pop(3)
    run.handle(Lost, worker=3, reason="it was killed")
    run.places[3] = 0
    run.handle(Joined, worker=3)
    for worker in (0, 1, 2):
        run.hand_in(worker)
    assert run.updates[-1] == [StepPlace(2, 3, 1)] * 3
    run.hand_in(3)
    assert run.reasons == [OTHER_STEP]
    for _ in range(2):  # the generator, and the first step of the critic
        assert sorted(run.tasks) == [0, 1, 2]
        for worker in (0, 1, 2):
            run.hand_in(worker)
    for worker in range(WORKERS):
        run.hand_in(worker)
    assert run.updates[-1] == [StepPlace(2, 2, 1)] * 4


def test_a_run_whose_data_end_makes_the_last_steps():
    run = loops("bsp", stop={"epochs": 1}, minibatches=sampler(WORKERS), per_epoch=WORKERS)
    for _ in range(2):
        assert [run.tasks[worker].minibatch is None for worker in range(WORKERS)] == [bool(run.updates)] * WORKERS
        for worker in range(WORKERS):
            run.hand_in(worker)
    assert run.updates == [[StepPlace(2, 1, 1)] * WORKERS, [StepPlace(1, 1, 2)] * WORKERS]
    assert run.end is None
    run.wait(2)
    assert run.end.reason == "1 epoch, 4 gradients, applied"
    assert run.reasons == [AFTER_LAST_ITERATION]


def test_a_worker_without_a_batch_waits_for_that_of_another_one():
    run = loops("k_sync(k=2)", stop={"epochs": 1}, minibatches=sampler(WORKERS), per_epoch=WORKERS)
    for worker in (0, 1):
        run.hand_in(worker)
    for worker in (0, 1):  # the generator, while two minibatches are under way again
        run.hand_in(worker)
    assert len(run.updates) == 2
    for worker in sorted(run.tasks):
        if run.tasks[worker].minibatch is None:
            run.wait(worker)
    assert set(run.reasons) <= {NO_BATCH, "finished after its interrupt"}


def sampler(per_run):
    return MinibatchSampler(WORKERS, per_epoch=per_run, partitioned=False, per_run=per_run)


def test_a_minibatch_that_no_batch_was_read_of_is_dealt_again():
    run = loops("bsp", minibatches=MinibatchSampler(WORKERS, per_epoch=8, partitioned=False))
    dealt = []
    for _ in range(4):
        dealt.append(sorted(task.minibatch.number for task in run.tasks.values()))
        for worker in range(WORKERS):
            run.hand_in(worker)
    assert dealt == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_a_step_that_is_not_known_any_more_may_be_any():
    iterations = Iterations()
    for number in range(KEPT + 1):
        iterations.admits(0, StepPlace(1, number + 1, 1), [0, 1])
        iterations.begin_update()
    iterations.pass_by(1, StepPlace(1, 1, 1))
    assert iterations.may_start(1, [0, 1])
    iterations.pass_by(1, StepPlace(1, 3, 1))
    assert not iterations.may_start(1, [0, 1])
    iterations.forget(0)
    assert iterations.may_start(1, [1]), "no worker is in step"


def test_a_worker_that_was_interrupted_counts_with_the_step_that_follows():
    run = loops("k_sync(k=1)")
    for _ in range(4):  # two iterations of worker 0, which interrupts the others
        run.hand_in(0)
    run.hand_in(1)
    assert [each[0].optimizer for each in run.updates] == [2, 1, 2, 1, 2]
    run.places[2] = 0
    run.hand_in(2)
    assert run.reasons == [OTHER_STEP]


def test_a_worker_whose_update_is_skipped_stays_in_step():
    critic, generator = StepPlace(2, 1, 1), StepPlace(1, 1, 2)
    iterations = Iterations()
    assert iterations.admits(0, critic, [0, 1])
    iterations.skip(1)
    iterations.begin_update()
    assert not iterations.admits(1, critic, [0, 1]), "it was interrupted before it made the step"
    assert iterations.may_start(1, [0, 1])
    assert iterations.admits(1, generator, [0, 1])


def test_after_a_step_that_all_loops_skip_they_make_the_next_one():
    run = loops("bsp", "WGAN")
    for _ in range(5):
        for worker in range(WORKERS):
            run.hand_in(worker)
    for worker in range(WORKERS):
        run.hand_in(worker, finite=False, skipped=True, overflowed=True)
    for worker in range(WORKERS):
        run.hand_in(worker)
    assert run.updates[-1] == [StepPlace(2, 3, 1)] * WORKERS


def test_no_update_waits_for_a_worker_without_a_batch():
    run = loops("bsp", stop={"epochs": 2}, minibatches=sampler(6), per_epoch=3)
    for worker in [*range(WORKERS)] * 2:
        run.hand_in(worker)
    without = [worker for worker, task in run.tasks.items() if task.minibatch is None]
    assert len(without) == 2
    for worker in range(WORKERS):
        (run.wait if worker in without else run.hand_in)(worker)
    assert run.reasons == [NO_BATCH] * 2
    assert run.updates[-1] == [StepPlace(2, 1, 1)] * 2
    for worker in list(run.tasks):
        run.hand_in(worker)
    assert run.updates[-1] == [StepPlace(1, 1, 2)] * 2
    run.wait(next(iter(run.tasks)))
    assert run.end.reason == "2 epochs, 6 gradients, applied"


def test_an_update_waits_for_a_worker_that_has_work_again():
    update = PendingUpdate()
    update.wait_again(1)
    update.joining.add(2)
    update.wait_again(2)
    assert update.awaited == {1}
    update.change_quorum(2, "a test")
    update.wait_again(3)
    assert update.awaited == {1}


def test_after_the_end_of_a_run_no_worker_has_work():
    run = loops("bsp", stop={"updates": 2})
    for worker in [*range(WORKERS)] * 2:
        run.hand_in(worker)
    assert run.end.reason == "2 updates made"
    assert not run.tasks
