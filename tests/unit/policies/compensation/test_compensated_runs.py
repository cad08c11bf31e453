"""Runs with compensation of stale gradients against a plain loop of stale SGD."""

import json
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import ClassVar

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.records import GradientArrived, UpdateMade
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from selections import each_value_once, parametrize_few
from stale_vectors import trained
from tiny_jobs import batch_norm_net, largest_relative_difference, parameters_of, sgd, tiny_job


class Literal:
    """Stale SGD written down plainly, in the order of a run's own arrivals, with all versions kept."""

    def __init__(self, job, result, scales_gradient):
        self.job, self.history, self.scales_gradient = job, result.history, scales_gradient
        self.model = build_model(job, 3)
        self.optimizer = job.optimizer(self.model.parameters())
        self.loader = MinibatchLoader(job, 3, 4)

    def run(self, scale, correct):
        versions, held = [parameters_of(self.model)], []
        for record in self.history:
            if isinstance(record, GradientArrived) and record.used:
                then, now = versions[record.version], versions[-1]
                g = correct(self.gradient(record, then), now, then)
                held.append((g, scale(record.staleness, now, then, self.optimizer.param_groups[0]["lr"])))
            elif isinstance(record, UpdateMade):
                self.step(held, versions[-1])
                versions.append(parameters_of(self.model))
                held = []
        return versions[-1]

    def gradient(self, record, at):
        nn.utils.vector_to_parameters(at.clone(), self.model.parameters())
        inputs, target = self.loader.batch(record.worker, record.draw, None)
        loss = self.job.loss(self.model(inputs), target)
        return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(self.model.parameters())))

    def step(self, held, at):
        nn.utils.vector_to_parameters(at.clone(), self.model.parameters())
        k, total = len(held), sum(scale for _, scale in held)
        g = sum(scale * g for g, scale in held) / (k if self.scales_gradient else total)
        start = 0
        for parameter in self.model.parameters():
            parameter.grad = g[start : start + parameter.numel()].view_as(parameter).clone()
            start += parameter.numel()
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.param_groups[0]["lr"] = lr if self.scales_gradient else lr * total / k
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] = lr


def unscaled(tau, now, then, lr):
    return 1.0


def uncorrected(g, now, then):
    return g


def eq_13(tau, now, then, lr):
    distance = float(((now - then) ** 2).sum())
    return min(0.002 / distance, lr) / lr if distance else 1.0


RULES = {
    "staleness_lr(C=0.002)": (eq_13, uncorrected),
    "staleness_weight": (lambda tau, now, then, lr: 1 / (1 + tau), uncorrected),
    "dc_asgd(lambda0=0.5)": (unscaled, lambda g, now, then: g + 0.5 * g * g * (now - then)),
    "staleness_lr(C=0.002) + dc_asgd(lambda0=0.5)": (eq_13, lambda g, now, then: g + 0.5 * g * g * (now - then)),
}


OPTIMIZERS = {
    "momentum": (sgd(momentum=0.9), True),
    "adam": (partial(torch.optim.Adam, lr=0.05), False),
}


@parametrize_few("protocol", ["k_async(k=3)", "asp"], keep=1)
@parametrize_few(("rule", "optimizer"), each_value_once(list(RULES), list(OPTIMIZERS)), keep=1)
def test_a_run_equals_a_plain_loop_of_stale_sgd(rule, protocol, optimizer):
    make, scales_gradient = OPTIMIZERS[optimizer]
    result = trained(f"{protocol} + {rule}", optimizer=make)
    assert any(record.staleness for record in result.history.of(GradientArrived))
    plain = Literal(tiny_job(optimizer=make), result, scales_gradient).run(*RULES[rule])
    assert largest_relative_difference(parameters_of(result.model), plain) < 1e-9
    without = trained(protocol, optimizer=make)
    assert largest_relative_difference(parameters_of(result.model), parameters_of(without.model)) > 1e-4


def test_the_record_of_each_gradient_has_formula_and_factor():
    result = trained("asp + staleness_weight + dc_asgd(lambda0=0.5)")
    for record in result.history.of(GradientArrived):
        (first, weight), (second, lambda_) = record.compensations
        assert (first, second) == ("1/(1+tau)", "g + lambda g g (w_now - w_then)")
        assert weight == record.step_scale == 1 / (1 + record.staleness)
        assert lambda_ == (0.5 if record.staleness else 0)
    scales = [record.step_scale for record in result.history.of(GradientArrived) if record.used]
    assert [update.step_scale for update in result.history.of(UpdateMade)] == scales


def first_frozen(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.0}, {"params": others, "lr": 0.1}])


def test_eta_max_is_the_rate_of_the_trainable_parameters():
    result = trained("asp + staleness_lr(C=1e-6)", optimizer=first_frozen)
    assert min(record.step_scale for record in result.history.of(GradientArrived)) < 0.1


@pytest.mark.slow
def test_compensation_does_not_change_the_average_of_buffers():
    plain = trained("k_async(k=3)", model=batch_norm_net, optimizer=sgd(lr=0.0))
    scaled = trained("k_async(k=3) + staleness_weight", model=batch_norm_net, optimizer=sgd(lr=0.0))
    for ours, theirs in zip(scaled.model.buffers(), plain.model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_synchronous_phase_has_no_compensation():
    plain, compensated = trained("bsp@updates=10 >> asp"), trained("bsp@updates=10 >> asp + staleness_weight")
    first = [record for record in compensated.history.of(GradientArrived) if record.now_s < 10]
    assert first[0].compensations == []
    assert not torch.equal(parameters_of(plain.model), parameters_of(compensated.model))


@dataclass(frozen=True, repr=False)
class Halved(pl.plans.Compensator):
    """A rule of the user's own."""

    name: ClassVar = "halved"
    kind: ClassVar = "scale"
    formula: ClassVar = "1/2 if stale"

    def compensate(self, delayed, memory):
        return 0.5 if delayed.staleness else 1.0


def test_a_user_defined_compensator_is_applied():
    result = trained(pl.asp() + Halved())
    for record in result.history.of(GradientArrived):
        assert record.compensations == [("1/2 if stale", record.step_scale)]
        assert record.step_scale == (0.5 if record.staleness else 1.0)


@dataclass(frozen=True, repr=False)
class Given(Halved):
    """Whatever it is told."""

    factor: object = 1.0

    def compensate(self, delayed, memory):
        return self.factor if delayed.staleness else 1.0


@pytest.mark.parametrize("factor", [0.0, -1.0, inf, float("nan"), None, "half"])
def test_an_invalid_scale_is_refused(factor):
    with pytest.raises(pl.UsageError, match=r"the step scale of halved=.* is not a number in"):
        trained(pl.k_async(k=2) + Given(factor))


def test_scales_with_an_underflowing_product_leave_a_step():
    rules = pl.plans.chain(Given(1e-200), pl.staleness_weight(lambda tau: 1.0 if tau == 0 else 1e-200))
    result = trained(pl.k_async(k=2) + rules)
    assert min(record.step_scale for record in result.history.of(GradientArrived)) > 0
    assert parameters_of(result.model).isfinite().all()


def weight_of_my_own(tau):
    return 1 / (1 + tau) ** 2


def test_a_user_defined_function_keeps_its_name_in_every_process():
    assert repr(pl.staleness_weight(weight_of_my_own)) == "staleness_weight(weighting=weight_of_my_own)"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, "gradient"),
        ({"clip_norm": 1.0}, "learning rate"),
        ({"optimizer": partial(torch.optim.Adam, lr=0.01)}, "learning rate"),
    ],
)
def test_a_run_records_whether_gradient_or_learning_rate_is_scaled(changes, part, tmp_path):
    job, out = tiny_job(**changes), tmp_path / "run"
    pl.train(job, protocol="asp + staleness_weight", cluster=pl.Cluster(2), stop="updates=3", out=out)
    assert json.loads((out / "run.json").read_text())["step_scale"] == f"multiplies the {part}"
