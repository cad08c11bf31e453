"""A job that would train nothing is refused on every engine, and one that trains only a part says which."""

import re
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.errors import PacelineWarning
from ranks import ranks
from selections import parametrize_few
from tiny_jobs import small_net, tiny_job

ELSEWHERE = nn.Parameter(torch.ones(1, dtype=torch.float64))


def detached(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]).detach()


def without_grad(model, batch):
    with torch.no_grad():
        return F.cross_entropy(model(batch[0]), batch[1])


def of_another_parameter(model, batch):
    return (ELSEWHERE * batch[0].mean()).sum()


def of_the_data(model, batch):
    return batch[0].mean().requires_grad_()


def other_optimizer(parameters):
    return torch.optim.SGD([ELSEWHERE], lr=0.1)


NO_GRADIENT = "job tiny: the loss has no gradient .*, so nothing would be trained; compute it from the model's output"
NOT_OF_THE_MODEL = "job tiny: the loss does not depend on the model: .* none of its 4 trainable parameters .*; compute"
NOT_HELD = "job tiny: the optimizer holds none of the model's 4 trainable parameters.*; build it from the parameters"
REFUSED = {
    "a detached loss": ({"loss": None, "step": detached}, NO_GRADIENT),
    "a loss under no_grad": ({"loss": None, "step": without_grad}, NO_GRADIENT),
    "a loss of another parameter": ({"loss": None, "step": of_another_parameter}, NOT_OF_THE_MODEL),
    "a loss of the data": ({"loss": None, "step": of_the_data}, NOT_OF_THE_MODEL),
    "an optimizer of another parameter": ({"optimizer": other_optimizer}, NOT_HELD),
    "in microbatches": ({"loss": None, "step": of_another_parameter, "microbatches": 2}, NOT_OF_THE_MODEL),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("protocol", ["bsp", "asp", "all_reduce", "dc_s3gd"])
def test_a_job_that_trains_nothing_is_refused(protocol, changes, message):
    with pytest.raises(pl.UsageError, match=message):
        pl.train(tiny_job(**changes), protocol=protocol, cluster=pl.Cluster(2), stop="updates=3")


@pytest.mark.parametrize("case", ["a detached loss", "a loss of another parameter"])
def test_local_processes_refuse_a_job_that_trains_nothing(case):
    changes, message = REFUSED[case]
    with pytest.raises(pl.UsageError, match=message):
        pl.train(tiny_job(**changes), protocol="bsp", cluster=pl.LocalCluster(1), stop="updates=3")


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["bsp", "all_reduce"])
def test_ranks_refuse_a_job_that_trains_nothing(protocol):
    changes, message = REFUSED["a loss of another parameter"]
    with ranks(2, tiny_job(**changes), protocol=protocol, stop="updates=3") as started:
        started.start(1)
        with pytest.raises(pl.UsageError, match=message):
            started.serve()
        with pytest.raises(pl.UsageError, match=message):
            started.end(1)


class Partly(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.net = small_net()
        self.unused = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(unused))
        self.times_zero = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, inputs):
        return self.net(inputs) + 0.0 * self.times_zero


NEVER = "the gradient of {} of {} trainable parameters ({}) was None or zero in each of the first 10 accepted gradients"


def said_about(job, protocol, updates, n=2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.train(job, protocol=protocol, cluster=pl.Cluster(n), stop=pl.Stop(updates=updates))
    return [str(warning.message) for warning in caught if warning.category is PacelineWarning]


@parametrize_few("protocol", ["asp", "all_reduce", "bsp", "dc_s3gd"], keep=1)
def test_parameters_without_a_gradient_are_named_once(protocol):
    [said] = said_about(tiny_job(model=partial(Partly, 1)), protocol, 40)
    assert NEVER.format(2, 6, "times_zero, unused.0") in said


def test_many_names_are_shortened():
    [said] = said_about(tiny_job(model=partial(Partly, 9)), "bsp", 20)
    names = "times_zero, unused.0, unused.1, unused.2, unused.3 and 5 more"
    assert NEVER.format(10, 14, names) in said


@pytest.mark.parametrize("updates", [9, 10])
def test_parameters_without_a_gradient_are_named_with_the_tenth_gradient(updates):
    assert len(said_about(tiny_job(model=partial(Partly, 1)), "asp", updates, n=1)) == (updates == 10)


class LowRank(nn.Module):
    """LoRA: the gradient of a is zero while b is."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(5, 3).double().requires_grad_(requires_grad=False)
        self.a = nn.Parameter(torch.ones(2, 5, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))

    def forward(self, inputs):
        return self.frozen(inputs) + inputs @ self.a.T @ self.b.T


@parametrize_few(("protocol", "updates"), [("bsp", 12), ("asp", 30), ("all_reduce", 12), ("dc_s3gd", 12)], keep=1)
def test_low_rank_adaptation_is_accepted(protocol, updates):
    assert said_about(tiny_job(model=LowRank), protocol, updates, n=16) == []


def of_the_last_layer(parameters):
    return torch.optim.SGD(list(parameters)[-2:], lr=0.1)


def test_parameters_that_the_optimizer_does_not_hold_are_named():
    [said] = said_about(tiny_job(optimizer=of_the_last_layer), "bsp", 3)
    assert re.search(r"holds 2 of the model's 4 trainable parameters, so 0\.weight, 0\.bias will not change", said)


def frozen_at_first():
    model = small_net()
    model[0].requires_grad_(requires_grad=False)
    return model


def test_frozen_parameters_cause_no_message():
    assert said_about(tiny_job(model=frozen_at_first), "bsp", 20) == []
