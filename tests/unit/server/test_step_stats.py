"""The measured step of an update, against parameters before and after, and the variance that microbatches show."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model
from tiny_jobs import parameters_of, small_net, tiny_job, update_of

OPTIMIZERS = {
    "plain SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "weight decay": partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "maximize": partial(torch.optim.SGD, lr=0.1, maximize=True),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "some layers": lambda parameters: torch.optim.SGD(list(parameters)[:2], lr=0.1),
    "rates by layer": lambda parameters: torch.optim.SGD(
        [{"params": [parameter], "lr": 0.1 / (i + 1)} for i, parameter in enumerate(parameters)], lr=0.1
    ),
}


def stepped(job, updates=4, lr_scale=0.5):
    """Return the steps that the server measures, and what they are by the parameters before and after."""
    model = build_model(job, 0)
    layout = FlatLayout(model)
    server = ParameterServer(job, model, layout, per_epoch=None)
    rng = torch.Generator().manual_seed(1)
    for _ in range(updates):
        gradient = layout.allocate()
        for flat in gradient.flat_parameters:
            flat.copy_(torch.randn(flat.shape, generator=rng, dtype=flat.dtype))
        g = torch.cat([view.reshape(-1) for view in gradient.parameters]).clone()
        before = parameters_of(model).clone()
        server.enqueue(gradient, 8)
        step = server.apply(update_of(1, lr_scale=lr_scale, measure=True))
        s = before - parameters_of(model)
        yield step, (float(g @ g), float(g @ s), float(s @ s))


@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_measured_step_equals_the_change_of_the_parameters(optimizer, clip_norm):
    for step, expected in stepped(tiny_job(optimizer=optimizer, clip_norm=clip_norm)):
        assert step[:3] == pytest.approx(expected, rel=1e-5)  # clipping itself adds 1e-6 to the norm
        assert step.learning_rate == pytest.approx(
            optimizer.keywords["lr"] / 2 if hasattr(optimizer, "keywords") else 0.05
        )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_overflowing_step_is_infinite(momentum):
    [(step, _)] = stepped(tiny_job(optimizer=partial(torch.optim.SGD, lr=1e200, momentum=momentum)), updates=1)
    assert step.squared_step == np.inf


def test_the_rate_of_a_step_is_that_of_a_trainable_group():
    def first_frozen(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.0}, {"params": others, "lr": 0.1}])

    [(step, _)] = stepped(tiny_job(optimizer=first_frozen), updates=1)
    assert (step.learning_rate, step.next_learning_rate) == (0.05, 0.1)


def test_plain_sgd_needs_no_copy():
    [(step, _), *_] = stepped(tiny_job(optimizer=OPTIMIZERS["plain SGD"]))
    assert step.progress == step.learning_rate * step.squared_norm
    assert step.squared_step == step.learning_rate**2 * step.squared_norm


def test_half_precision_is_measured():
    job = tiny_job(model=partial(small_net, torch.bfloat16), optimizer=OPTIMIZERS["momentum"])
    for step, expected in stepped(job):
        assert step[:3] == pytest.approx(expected, rel=0.05)


def test_the_next_learning_rate_follows_the_schedule():
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1)
    job = tiny_job(optimizer=OPTIMIZERS["plain SGD"], scheduler=schedule)
    rates = [(step.learning_rate, step.next_learning_rate) for step, _ in stepped(job, lr_scale=1.0)]
    assert np.array(rates) == pytest.approx(np.array([(0.1, 0.1), (0.1, 0.01), (0.01, 0.01), (0.01, 0.001)]))


# -- microbatches


def gradients_of(job, count):
    replica = Replica(job, seed=3, n=1)
    version, gradient = replica.layout.allocate(), replica.layout.allocate()
    for view, parameter in zip(version.parameters, replica.model.parameters(), strict=True):
        view.copy_(parameter.detach())
    for draw in range(1, count + 1):
        measured = replica.gradient(0, draw, None, version, gradient)
        yield measured, torch.cat([view.reshape(-1) for view in gradient.parameters]).clone()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5).double()
        self.out = nn.Linear(5, 3).double()

    def forward(self, inputs):
        return self.out(self.inner(torch.tanh(self.inner(inputs))))


@pytest.mark.parametrize("model", [small_net, Tied])
@pytest.mark.parametrize("microbatches", [2, 3, 8])
def test_the_variance_equals_that_of_the_microbatches(microbatches, model):
    """Against the sample variance of the gradients of the microbatches, computed one by one."""
    job = tiny_job(microbatches=microbatches, model=model)
    [(measured, g)] = gradients_of(job, 1)
    batch = Replica(job, seed=3, n=1)._source.load(0, 1, None)
    model = build_model(job, 3)
    ends = [8 * i // microbatches for i in range(microbatches + 1)]
    spread = 0.0
    for start, end in pairwise(ends):
        model.zero_grad()
        F.cross_entropy(model(batch[0][start:end]), batch[1][start:end]).backward()
        part = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
        spread += (end - start) / 8 * float((part - g) @ (part - g))
    assert measured.variance == pytest.approx(spread / (microbatches - 1))


@pytest.mark.slow
def test_the_variance_has_no_bias():
    job = tiny_job(microbatches=4, batch_size=16)
    variances, gradients = zip(*((m.variance, g) for m, g in gradients_of(job, 600)), strict=True)
    true = float(torch.stack(gradients).var(dim=0).sum())
    assert np.mean(variances) == pytest.approx(true, rel=0.1)


def test_an_undivided_minibatch_has_no_variance():
    [(measured, _)] = gradients_of(tiny_job(), 1)
    assert np.isnan(measured.variance)


def test_a_worker_reports_its_variance():
    result = pl.train(
        tiny_job(microbatches=2), protocol="asp", cluster=pl.Cluster(2, pl.timing.Exponential(1.0)), stop="updates=3"
    )
    assert all(arrival.variance > 0 for arrival in result.history.of(pl.callbacks.GradientArrived) if arrival.used)
