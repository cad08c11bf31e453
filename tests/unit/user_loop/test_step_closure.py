"""Closures of `optimizer.step(closure)` in attached loops, with a server and without."""

import pytest
import torch

import paceline as pl
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import make_network, make_parts, numbered_data, of_the_mean_gradient, sgd, step_with_closure, train
from paceline.user_loop.hooks.step_closure import call_closure
from selections import parametrize_few

EXACT = 1e-12


@parametrize_few(("ranks_of", "protocol"), [(AttachedThreads, "bsp"), (AllReduceLoops, "all_reduce")], keep=1)
def test_the_gradient_of_a_closure_is_handed_in(ranks_of, protocol):
    network = make_network()
    ranks = ranks_of(2, make_parts(network, numbered_data()), protocol)
    steps = ranks.run(train(step=step_with_closure))
    expected = of_the_mean_gradient(network, sgd, steps)
    for model, _, _ in ranks.parts:
        for ours, theirs in zip(model.parameters(), expected, strict=True):
            assert (ours - theirs).abs().max() < EXACT


@pytest.mark.parametrize("how", ["args", "kwargs"])
def test_a_closure_is_called_once_with_gradients_and_its_value_is_returned_to_the_step(how):
    def closure():
        calls.append(torch.is_grad_enabled())
        return 2.5

    calls = []
    with torch.no_grad():
        answer = call_closure(("optimizer", closure), {}) if how == "args" else call_closure((1,), {"closure": closure})
    assert calls == [True]
    args, kwargs = answer
    replaced = args[1] if how == "args" else kwargs["closure"]
    assert replaced() == 2.5
    with pytest.raises(pl.RunError, match="calls the closure again within a step"):
        replaced()
    assert calls == [True]


@pytest.mark.parametrize("arguments", [((1,), {}), ((1, None), {}), ((1,), {"closure": None})])
def test_a_step_without_a_closure_keeps_its_arguments(arguments):
    assert call_closure(*arguments) is None
