"""What a run leaves: the optimizer, the scheduler and the model are as before it, and may be attached again."""

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import SAMPLES, check_equal_models, loss_of, make_network, make_parts, numbered_data, step, train
from paceline.errors import RunError
from selections import parametrize_few

MINIBATCHES = SAMPLES // 4
LOCAL_STEPS = "bsp + local_steps(H=2, outer='sgd(lr=1)')"
RANKS = {"bsp": AttachedThreads, LOCAL_STEPS: AttachedThreads, "all_reduce": AllReduceLoops}


def in_turn(protocol, loops):
    """Run one loop after another with the same models and optimizers; return the ranks of each run."""
    parts = [make_parts(make_network(), numbered_data())() for _ in range(2)]
    made = []
    for loop in loops:
        ranks = RANKS[protocol](2, iter(parts).__next__, protocol)
        made.append((ranks, ranks.run(loop)))
    return made


@parametrize_few("protocol", RANKS, keep=1)
def test_an_optimizer_has_a_second_run(protocol):
    def loop(run, model, optimizer):
        optimizer.load_state_dict(optimizer.state_dict())  # which is refused during a run
        train(epochs=1)(run, model, optimizer)
        return run.workload

    for ranks, workloads in in_turn(protocol, [loop, loop]):
        assert workloads == [MINIBATCHES] * 2
        check_equal_models(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", RANKS)
def test_an_optimizer_has_a_second_run_after_one_that_has_failed(protocol):
    def failing(run, model, optimizer):
        for _ in run.epochs(1):
            for x, y in run.loader:
                with run.minibatch():
                    loss_of(model, x, y).backward()
                    raise ValueError

    [(_, errors), (ranks, answers)] = in_turn(protocol, [failing, train(epochs=1)])
    assert ValueError in map(type, errors)
    assert all(isinstance(error, ValueError | RunError) for error in errors)  # which the other rank may be told first
    assert [len(steps) for steps in answers] == [MINIBATCHES // 2] * 2
    check_equal_models(ranks)


@parametrize_few("protocol", RANKS, keep=1)
def test_after_the_run_the_optimizer_steps_and_the_scheduler_is_of_its_class(protocol):
    def loop(run, model, optimizer):
        scheduler = StepLR(optimizer, 1, 0.5)
        run.set_scheduler(scheduler)
        for _ in run.epochs(1):
            for batch in run.loader:
                with run.minibatch():
                    step(model, optimizer, [batch])
        before = model.last.weight.detach().clone()
        step(model, optimizer, [batch])
        hooks = [hook for each in model.modules() for hook in (*each._forward_pre_hooks, *each._forward_hooks)]
        return type(scheduler) is StepLR, torch.equal(before, model.last.weight), hooks

    [(_, answers)] = in_turn(protocol, [loop])
    assert answers == [(True, False, [])] * 2
