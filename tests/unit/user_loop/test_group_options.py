"""Options of parameter groups that the loop changes travel with each gradient, as its learning rate does."""

import copy
import math

import numpy as np
import pytest
import torch

from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import loss_of, make_network, make_parts, numbered_data, step
from paceline.server.optimizer import set_options
from selections import parametrize_few

EXACT = 1e-12
HAS_MUON = hasattr(torch.optim, "Muon")


def sgd(model):
    named = dict(model.named_parameters())
    matrices = [each for each in named.values() if each.ndim > 1]
    vectors = [each for each in named.values() if each.ndim == 1]
    return torch.optim.SGD([{"params": matrices}, {"params": vectors}], lr=0.05, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def rmsprop(model):
    return torch.optim.RMSprop(model.parameters(), lr=0.01)


def rprop(model):
    return torch.optim.Rprop(model.parameters(), lr=0.01)


def change(option, value_of):
    def at(optimizer, number):
        optimizer.param_groups[-1][option] = value_of(number)

    return at


CHANGES = {
    "weight decay": (sgd, change("weight_decay", lambda number: 0.1 * number)),
    "weight decay of numpy": (adamw, change("weight_decay", lambda number: np.float64(0.1) * number)),
    "momentum": (sgd, change("momentum", lambda number: 0.9 - 0.05 * number)),
    "dampening": (sgd, change("dampening", lambda number: 0.01 * number)),
    "nesterov": (sgd, change("nesterov", lambda number: number % 2 == 1)),
    "maximize": (sgd, change("maximize", lambda number: number % 4 == 3)),
    "foreach": (adamw, change("foreach", lambda number: number % 2 == 1)),
    "both betas": (adamw, change("betas", lambda number: (0.9 - 0.05 * number, 0.999 - 0.05 * number))),
    "betas as a list": (adamw, change("betas", lambda number: [0.9, 0.999 - 0.05 * number])),
    "eps": (adamw, change("eps", lambda number: 10.0 ** (-number))),
    "an infinite step size": (rprop, change("step_sizes", lambda number: (1e-6 * number, math.inf))),
    "alpha": (rmsprop, change("alpha", lambda number: 0.99 - 0.05 * number)),
}


@parametrize_few(("make_optimizer", "change"), CHANGES.values(), ids=CHANGES, keep=1)
def test_the_server_steps_with_the_options_of_the_loop(make_optimizer, change):
    taken = []

    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for batch in run.loader:
                change(optimizer, len(taken))
                step(model, optimizer, [batch])
                taken.append(batch)

    network = make_network()
    ranks = AttachedThreads(1, make_parts(network, numbered_data(), make_optimizer), "bsp")
    assert ranks.run(loop) == [None]
    alone = copy.deepcopy(network)
    optimizer = make_optimizer(alone)
    for number, (x, y) in enumerate(taken):
        change(optimizer, number)
        optimizer.zero_grad()
        loss_of(alone, x, y).backward()
        optimizer.step()
    for ours, theirs in zip(ranks.parts[0][0].parameters(), alone.parameters(), strict=True):
        assert (ours - theirs).abs().max() < EXACT


@pytest.mark.skipif(not HAS_MUON, reason="this version of torch has no Muon")
def test_options_of_an_optimizer_for_matrices_are_taken():
    optimizer = torch.optim.Muon([torch.nn.Parameter(torch.ones(2, 2))])
    assert set_options(optimizer, [{"momentum": 0.8}]) == ""
    assert optimizer.param_groups[0]["momentum"] == 0.8
    assert "Muon does not take {'momentum': -1.0}" in set_options(optimizer, [{"momentum": -1.0}])


def test_without_a_server_ranks_take_options_of_numpy():
    def decayed(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=np.float32(0.1))

    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for batch in run.loader:
                step(model, optimizer, [batch])

    ranks = AllReduceLoops(2, make_parts(make_network(), numbered_data(), decayed), "all_reduce")
    assert ranks.run(loop) == [None, None]
