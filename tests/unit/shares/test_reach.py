"""Which backward passes reach a model that is taken over."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.shares.reach import MOST_PASSES, ForwardPasses


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.fixture
def passes(model):
    watched = ForwardPasses()
    watched.watch(model)
    return watched


def gradient_of(out, x):
    return torch.autograd.grad(out.sum(), x, create_graph=True)[0]


X = torch.ones(5, 3)
REACHING = {
    "its loss": lambda model: model(X).mean(),
    "its second output": lambda model: model(X)[:, 1].logsumexp(0),
    "its output, fed to another model": lambda model: nn.Linear(2, 1)(model(X)).mean(),
    "another model, fed to it": lambda model: model(nn.Linear(3, 3)(X)).mean(),
    "a loss of it and a penalty": lambda model: sum(p.abs().sum() for p in model.parameters()) + model(X).mean(),
    "a penalty on its gradient": lambda model: gradient_of(model(x := X.clone().requires_grad_()), x).pow(2).mean(),
    "its output of an earlier pass": lambda model: next(iter([model(X).mean() for _ in range(3)])),
    "a part of it": lambda model: model[0](X).pow(2).mean(),
    "a function of its weight and data": lambda model: (X @ model[0].weight.T).pow(2).mean(),
    "a checkpoint of it": lambda model: checkpoint(model, X.clone().requires_grad_(), use_reentrant=True).mean(),
}
OTHERS = {
    "a local model": lambda model: nn.Linear(3, 3)(X).mean(),
    "a local model, fed its detached output": lambda model: nn.Linear(2, 1)(model(X).detach()).mean(),
    "a local model after a pass of it": lambda model: [model(X), nn.Linear(3, 3)(X).mean()][1],
    "an input": lambda model: X.clone().requires_grad_().pow(2).mean(),
    "a leaf": lambda model: torch.ones((), requires_grad=True),
    "a sum of squares": lambda model: sum(each.pow(2).sum() for each in model.parameters()),
    "a mean of a part": lambda model: 0.1 * model[0].weight.abs().mean(),
    "a bound on weights": lambda model: 1e-3 * nn.functional.relu(-model[0].weight).mean(),
    "large weights": lambda model: model[0].weight.clamp(min=0).exp().sum().log1p(),
    "orthogonal weights": lambda model: (model[0].weight.T @ model[0].weight - torch.eye(3)).norm(),
    "its output without gradients": lambda model: (lambda out: nn.Linear(2, 2)(out).mean())(no_grad(model)),
}


def no_grad(model):
    with torch.no_grad():
        return model(X)


@pytest.mark.parametrize("name", REACHING)
def test_what_comes_from_a_pass_of_the_model_reaches_it(name, model, passes):
    assert passes.are_reached_by([REACHING[name](model)])


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_come_from_a_pass_of_the_model_does_not(name, model, passes):
    model(X)
    assert not passes.are_reached_by([OTHERS[name](model)])


def test_any_root_counts(model, passes):
    assert passes.are_reached_by([nn.Linear(3, 3)(X).mean(), model(X).mean()])


def test_a_model_whose_hooks_are_not_called_is_reached_by_its_parameters(model, passes):
    assert passes.are_reached_by([model.forward(X).mean()])


def test_a_pass_that_failed_leaves_the_next_one_right(model, passes):
    with pytest.raises(RuntimeError):
        model(torch.ones(5, 7))
    local = nn.Linear(3, 3)(X).mean()
    assert passes.are_reached_by([model(X).mean()])
    assert not passes.are_reached_by([local])


def test_a_chain_of_more_passes_than_are_remembered_is_reached(model, passes):
    total = sum(model(X).mean() for _ in range(MOST_PASSES + 5))
    assert passes.are_reached_by([total])
