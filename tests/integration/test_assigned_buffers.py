"""Buffers that a job assigns anew: followed where names, shapes and types stay, else refused by name.

An element that stays infinite, as of an attention mask, does not change.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from selections import parametrize_each_once

DATA = TensorDataset(torch.ones(32, 2))
LOOPS = [("bsp", AttachedThreads), ("bsp + local_steps(H=2)", AttachedThreads), ("all_reduce", AllReduceLoops)]


class Model(nn.Module):
    """Model whose forward pass changes its buffers by a function."""

    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("sum", torch.zeros(2))
        self.register_buffer("empty", None)
        self.register_buffer("grows", torch.zeros(0))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.inf]))
        self.register_buffer("least", torch.tensor(torch.inf))
        self.change = change

    def forward(self, x):
        self.change(self, x)
        return self.linear(x)


def assign(model, x):
    model.sum = model.sum + x.mean(dim=0)


def assign_with_history(model, x):
    model.sum = (model.sum + x.mean(dim=0)) * (model.linear.weight[0] * 0 + 1)


def fill(model, x):
    model.empty = x.mean(dim=0)


def register(model, x):
    model.register_buffer("late", x.mean(dim=0))


def grow(model, x):
    model.grows = x.mean(dim=0)


def grow_in_place(model, x):
    model.grows.resize_(2).copy_(x.mean(dim=0))


def turn_in_place(model, x):
    model.sum.resize_(2, 1)


def remove(model, x):
    model.sum = None


def observe(model, x):
    """See values for the first time, as an observer of quantization."""
    model.least = torch.minimum(model.least, x.min())


REFUSED = [
    (fill, "buffer empty of the model is float32[2], but was missing"),
    (register, "buffer late of the model is float32[2], but was missing"),
    (grow, "buffer grows of the model is float32[2], but was float32[0]"),
    (grow_in_place, "buffer grows of the model is float32[2], but was float32[0]"),
    (turn_in_place, "buffer sum of the model is float32[2, 1], but was float32[2]"),
    (remove, "buffer sum of the model is missing, but was float32[2]"),
    (observe, "buffer least of the model was infinite and is finite now"),
]


SIMULATED = ["bsp", "bsp + local_steps(H=2)", "all_reduce", "local_sgd(H=2)", "dc_s3gd"]


def job(change):
    return pl.Job(
        model=lambda: Model(change),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=DATA,
        batch_size=2,
        step=lambda model, batch: model(batch[0]).sum(),
    )


def attached(change, protocol, kind):
    def make():
        model = Model(change)
        return model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(DATA, batch_size=2)

    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for (x,) in run.loader:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

    ranks = kind(2, make, protocol)
    try:
        return ranks, ranks.run(loop)
    except pl.UsageError as error:
        return ranks, [error]  # of the server, which a worker has told


@parametrize_each_once(change=[assign, assign_with_history], protocol=SIMULATED)
def test_a_job_may_assign_a_buffer(protocol, change):
    trained = pl.train(job(change), protocol=protocol, cluster=pl.Cluster(2), stop="updates=6", progress=False)
    assert trained.model.sum.tolist() == [12.0 if "local_steps" in protocol else 6.0] * 2
    assert trained.model.mask.tolist() == [0.0, -torch.inf, torch.inf]


@parametrize_each_once(protocol__kind=LOOPS, change=[assign, assign_with_history])
def test_an_attached_loop_may_assign_a_buffer(change, protocol, kind):
    ranks, answers = attached(change, protocol, kind)
    assert answers == [None, None]
    assert [model.sum.tolist() for model, _, _ in ranks.parts] == [[8.0, 8.0]] * 2
    assert [model.mask.tolist() for model, _, _ in ranks.parts] == [[0.0, -torch.inf, torch.inf]] * 2


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_a_job_with_other_buffers_is_refused(change, words):
    with pytest.raises(pl.UsageError) as refusal:
        pl.train(job(change), protocol="bsp", cluster=pl.Cluster(2), stop="updates=5", progress=False)
    assert words in str(refusal.value)


@parametrize_each_once(protocol__kind=LOOPS, change__words=REFUSED)
def test_an_attached_loop_with_other_buffers_is_refused(change, words, protocol, kind):
    _, answers = attached(change, protocol, kind)
    assert any(isinstance(each, pl.UsageError) and words in str(each) for each in answers)
