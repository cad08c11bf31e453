"""Works of attached loops that end early, as threads: interrupts, loops that end or pause, steps without a gradient."""

import threading

import pytest
import torch
from torch.amp import GradScaler

from attached_threads import AttachedThreads
from attached_turns import LIMIT_S, wait_until
from loop_parts import BATCH, SAMPLES, loss_of, make_parts, step
from paceline.core.records import GradientArrived
from selections import parametrize_few

EPOCHS = 2
MINIBATCHES = EPOCHS * SAMPLES // BATCH


def loop(run, model, optimizer):
    """Return the number of steps of the loop."""
    return sum(step(model, optimizer, [batch]) or 1 for _ in run.epochs(EPOCHS) for batch in run.loader)


@pytest.mark.slow
def test_a_rank_that_is_interrupted_within_a_step_begins_its_next_work(network, data):
    has_begun = threading.Event()

    class Waiting(torch.optim.SGD):
        run = None

        def step(self, closure=None):
            run, self.run = self.run, None
            if run is not None:
                has_begun.set()
                wait_until(lambda: run._tasks.task.is_interrupted)
            return super().step(closure)

    def noting(run, model, optimizer):
        is_slow = model is ranks.parts[1][0]
        optimizer.run = run if is_slow else None
        seen = []
        for _ in run.epochs(EPOCHS):
            for batch in run.loader:
                seen.append((run._tasks.task.step, run.update))
                assert is_slow or has_begun.wait(LIMIT_S)
                if len(seen) == 5 and not is_slow:  # in its second work
                    wait_until(lambda: run._tasks.task.is_interrupted)
                step(model, optimizer, [batch])
        return seen

    parts = make_parts(network, data, lambda model: Waiting(model.parameters(), lr=0.05))
    ranks = AttachedThreads(2, parts, "k_sync(k=1) + local_steps(H=3)")
    _, seen = ranks.run(noting)
    assert seen[0] == (0, 0)
    assert seen[1][0] == 0
    assert seen[1][1] > 0


@parametrize_few("how", ["return", "raise", "raise in the step"], keep=1)
def test_a_loop_that_ends_within_a_work_gives_it_back(how, network, data):
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise ValueError("of the user")
            return super().step(closure)

    def ending(run, model, optimizer):
        if model is not ranks.parts[1][0]:
            return loop(run, model, optimizer)
        steps = 0
        for _ in run.epochs(EPOCHS):
            for batch in run.loader:
                step(model, optimizer, [batch])
                steps += 1
                optimizer.fails = steps == 4 and how == "raise in the step"
                if steps == 5 and how == "raise":
                    raise ValueError("of the user")
                if steps == 5:
                    return steps
        return None

    parts = make_parts(network, data, lambda model: Failing(model.parameters(), lr=0.05, momentum=0.9))
    ranks = AttachedThreads(3, parts, "bsp + local_steps(H=3)")
    first, second, third = ranks.run(ending)
    assert str(second) == ("5" if how == "return" else "of the user")
    assert first + third >= MINIBATCHES - 3  # one work of the other rank was accepted
    history = ranks.server.result.history
    assert history.totals.samples_used == EPOCHS * SAMPLES
    assert [each.minibatches for each in history.of(GradientArrived) if each.worker == 1] == [3]


@pytest.mark.slow
def test_a_pause_within_a_work_gives_it_back_and_the_rank_takes_part_again(network, data):
    is_back = threading.Event()

    def pausing(run, model, optimizer):
        pauses = model is ranks.parts[1][0]
        for _ in run.epochs(EPOCHS):
            for batch in run.loader:
                assert pauses or is_back.wait(LIMIT_S)
                step(model, optimizer, [batch])
                if pauses and not is_back.is_set():
                    with run.pause():
                        pass
                    is_back.set()

    ranks = AttachedThreads(2, make_parts(network, data), "bsp + local_steps(H=3)")
    assert ranks.run(pausing) == [None] * 2
    history = ranks.server.result.history
    assert history.totals.samples_used == EPOCHS * SAMPLES
    draws = [each.draw for each in history.of(GradientArrived) if each.worker == 1]
    assert len(draws) > 1
    assert 1 not in draws


@pytest.mark.slow
def test_a_block_of_the_loop_is_interrupted_between_two_layers(network, data):
    has_begun = threading.Event()

    def blocks(run, model, optimizer):
        is_slow, left = model is ranks.parts[1][0], 0
        for _ in run.epochs(EPOCHS):
            for batch in run.loader:
                assert is_slow or has_begun.wait(LIMIT_S)
                left += 1
                with run.minibatch():
                    if is_slow and not has_begun.is_set() and run._tasks.task.step == 1:
                        has_begun.set()
                        wait_until(lambda: run._tasks.task.is_interrupted)
                    step(model, optimizer, [batch])
                    left -= 1
        return left

    ranks = AttachedThreads(2, make_parts(network, data), "k_sync(k=1) + local_steps(H=3)")
    _, left = ranks.run(blocks)
    assert left > 0
    assert ranks.server.result.history.totals.samples_used == EPOCHS * SAMPLES


@parametrize_few("overflows", [{1}, {0, 1, 2}], keep=1)
def test_a_step_that_a_scaler_skips_is_left_out_of_the_work(overflows, network, data):
    def scaled(run, model, optimizer):
        scaler, number = GradScaler("cpu", init_scale=8.0, growth_interval=1000), 0
        for _ in run.epochs(EPOCHS):
            for x, y in run.loader:
                optimizer.zero_grad()
                scaler.scale(loss_of(model, x * torch.inf if number in overflows else x, y)).backward()
                scaler.step(optimizer)
                scaler.update()
                number += 1
        return scaler.get_scale()

    ranks = AttachedThreads(1, make_parts(network, data), "bsp + local_steps(H=3)")
    assert ranks.run(scaled) == [8.0 / 2 ** len(overflows)]
    first = ranks.server.result.history.of(GradientArrived)[0]
    if len(overflows) == 3:
        assert (first.used, first.reason) == (False, "its loop skipped the step")
    else:
        assert (first.used, first.samples, first.minibatches) == (True, 2 * BATCH, 3)
    assert all(parameter.isfinite().all() for parameter in ranks.parts[0][0].parameters())


def test_a_gradient_that_is_not_finite_ends_the_work_which_is_dropped(network, data):
    def bad(run, model, optimizer):
        for epoch in run.epochs(EPOCHS):
            for number, (x, y) in enumerate(run.loader):
                step(model, optimizer, [(x * torch.inf if (epoch, number) == (0, 1) else x, y)])

    ranks = AttachedThreads(1, make_parts(network, data), "bsp + local_steps(H=3)")
    ranks.run(bad)
    first, *others = ranks.server.result.history.of(GradientArrived)
    assert (first.used, first.reason, first.minibatches) == (False, "not finite", 2)
    assert all(each.used for each in others)
