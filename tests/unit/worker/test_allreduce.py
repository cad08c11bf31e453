"""All-reduce algorithms against plain loops, in simulated time."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytorch_optimizer import LARS, Lamb
from torch import nn

import paceline as pl
from allreduce_runs import ALGORITHMS, DECAY, ITERATIONS, MOMENTUM, RATE, N, decaying, trained
from paceline.catalogue.parser import parse_plan
from paceline.core.records import VersionEvaluated
from paceline.policies.compensation.delay import DCS3GD
from paceline.protocols.outer_optimizer import OuterSGD
from paceline.protocols.plan_checks import checked_plan
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from paceline.worker.allreduce import make_algorithm
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from selections import parametrize_few
from tiny_jobs import (
    batch_norm_net,
    dataset,
    largest_relative_difference,
    parameters_of,
    plain_loop,
    sgd,
    tiny_job,
    update_of,
)


@parametrize_few("n", [4, 1, 5], keep=1)
def test_all_reduce_is_plain_synchronous_sgd(n):
    job = tiny_job(optimizer=decaying)
    plain = plain_loop(job, 3, n, ITERATIONS)
    ours = trained("all_reduce", job, n)
    assert largest_relative_difference(parameters_of(ours.model), parameters_of(plain)) < 1e-12


@parametrize_few(
    "protocol",
    ["dc_s3gd", "local_sgd(H=7)", "local_sgd(H=3, lag=5)", "s3gd", "dc_s3gd(lag=3)", "local_sgd(H=1)"],
    keep=1,
)
def test_one_worker_is_plain_sgd(protocol):
    job = tiny_job(optimizer=decaying)
    plain = plain_loop(job, 3, 1, ITERATIONS)
    ours = trained(protocol, job, n=1)
    assert largest_relative_difference(parameters_of(ours.model), parameters_of(plain)) < 1e-13


def test_update_averaging_without_overlap_and_correction_is_plain_sgd():
    job = tiny_job(optimizer=decaying)
    plain = plain_loop(job, 3, N, ITERATIONS)
    blocking = replace(pl.bsp().until(0.5), end=None, allreduce=pl.plans.AllReduceConfig(sums="updates"))
    ours = trained(blocking, job)
    assert largest_relative_difference(parameters_of(ours.model), parameters_of(plain)) < 1e-12


def test_local_sgd_averages_every_h_gradients_and_at_the_end():
    job, period, updates = tiny_job(optimizer=decaying), 4, 22
    models = [build_model(job, 3) for _ in range(N)]
    optimizers = [decaying(model.parameters()) for model in models]
    loader = MinibatchLoader(job, 3, N)
    for draw in range(1, updates + 1):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inputs, target = loader.batch(worker, draw, None)
            optimizer.zero_grad()
            job.loss(model(inputs), target).backward()
            optimizer.step()
        if draw % period == 0 or draw == updates:
            average = torch.stack([nn.utils.parameters_to_vector(model.parameters()) for model in models]).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(average.detach().clone(), model.parameters())
    ours = trained(f"local_sgd(H={period})", job, updates=updates)
    assert largest_relative_difference(parameters_of(ours.model), average.detach()) < 1e-12


def diloco(job, workers, period, rounds, lr, momentum):
    """Return the parameters of DiLoCo, in numpy: AdamW inside, Nesterov's momentum outside."""
    model, loader = build_model(job, 3), MinibatchLoader(job, 3, workers)
    inner = [job.optimizer(model.parameters()) for _ in range(workers)]
    w = parameters_of(model).numpy()
    m = np.zeros_like(w)
    for outer_round in range(rounds):
        ends = []
        for worker in range(workers):
            nn.utils.vector_to_parameters(torch.tensor(w), model.parameters())
            for draw in range(outer_round * period + 1, (outer_round + 1) * period + 1):
                inputs, target = loader.batch(worker, draw, None)
                inner[worker].zero_grad()
                job.loss(model(inputs), target).backward()
                inner[worker].step()
            ends.append(parameters_of(model).numpy().copy())
        delta = w - np.mean(ends, axis=0)
        m = momentum * m + delta
        w = w - lr * (delta + momentum * m)
    return torch.tensor(w)


def test_diloco_is_its_transcription():
    job = tiny_job(optimizer=partial(torch.optim.AdamW, lr=1e-2))
    protocol = "local_sgd(H=4, outer='nesterov(lr=0.7, momentum=0.9)')"
    ours = trained(protocol, job, n=3, updates=10 * 4)
    theirs = diloco(job, workers=3, period=4, rounds=10, lr=0.7, momentum=0.9)
    assert largest_relative_difference(parameters_of(ours.model), theirs) < 1e-12


@pytest.mark.slow
def test_an_outer_rate_of_one_without_momentum_is_the_mean():
    job = tiny_job(optimizer=decaying)
    ours, theirs = trained("local_sgd(H=4, outer='sgd(lr=1)')", job), trained("local_sgd(H=4)", job)
    assert largest_relative_difference(parameters_of(ours.model), parameters_of(theirs.model)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, LARS, Lamb])
def test_the_update_of_any_optimizer_is_its_change_to_the_average(optimizer):
    job = tiny_job(optimizer=partial(optimizer, lr=1e-2, weight_decay=DECAY))
    loader, at, stepped = MinibatchLoader(job, 3, N), build_model(job, 3), [build_model(job, 3) for _ in range(N)]
    optimizers = [job.optimizer(model.parameters()) for model in stepped]
    average = parameters_of(at)
    own, deltas = [average] * N, []
    for draw in range(1, ITERATIONS + 2):
        before = average
        average = average + sum(deltas) / N if deltas else average
        deltas = []
        for worker, (model, step) in enumerate(zip(stepped, optimizers, strict=True)):
            nn.utils.vector_to_parameters(own[worker].clone(), at.parameters())
            inputs, target = loader.batch(worker, draw, None)
            gradient = torch.autograd.grad(job.loss(at(inputs), target), at.parameters())
            with torch.no_grad():
                nn.utils.vector_to_parameters(average.clone(), model.parameters())
            for parameter, each in zip(model.parameters(), gradient, strict=True):
                parameter.grad = each
            step.step()
            deltas.append(parameters_of(model) - average)
        own = [average + delta for delta in deltas]
    assert largest_relative_difference(before, average) > 1e-4  # the weights change
    ours = trained("s3gd", job)
    assert largest_relative_difference(parameters_of(ours.model), average) < 1e-12


@pytest.mark.slow
def test_buffers_after_all_reduce_equal_those_of_bsp():
    job = tiny_job(model=batch_norm_net)
    ours, theirs = (dict(trained(each, job).model.named_buffers()) for each in ("all_reduce", "bsp"))
    assert ours.keys() == theirs.keys()
    for name, buffer in ours.items():
        torch.testing.assert_close(buffer, theirs[name], rtol=1e-12, atol=1e-12)


def test_floating_point_buffers_are_averaged_and_whole_numbers_are_those_of_worker_0():
    run = trained("dc_s3gd", tiny_job(model=batch_norm_net))
    buffers = dict(run.model.named_buffers())
    assert buffers["1.num_batches_tracked"] == ITERATIONS
    assert buffers["1.running_var"].min() > 0


class Counting(nn.Linear):
    """A linear layer that counts its forward passes in training."""

    def __init__(self):
        super().__init__(5, 3, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        if self.training:
            self.count += 1
        return super().forward(inputs)


def loss_and_count(model, batch):
    inputs, target = batch
    return F.cross_entropy(model(inputs), target), {"count": model.count.double()}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ALGORITHMS)
def test_counting_buffers_are_those_of_worker_0_in_every_evaluation(protocol, tmp_path):
    job = tiny_job(model=Counting, eval_data=dataset(20), loss=None, step=loss_and_count)
    settings = {"protocol": protocol, "cluster": "4*deterministic(value=1)", "evaluate_every": "updates=1"}
    run = pl.train(job, stop="updates=5", out=tmp_path / "run", checkpoint_every="updates=1", **settings)
    run = pl.train(job, stop="updates=11", resume=tmp_path / "run", **settings)
    counts = [record.metrics["count"] for record in run.history.of(VersionEvaluated)]
    assert counts == [*range(1, 12)]
    assert run.model.count == 11


def test_a_worker_that_skips_an_iteration_restarts_from_the_average():
    """A worker without a gradient applies the sum of the others and discards its own local step."""
    model = build_model(tiny_job(model=Counting), 3)
    layout = FlatLayout(model)
    server = ParameterServer(tiny_job(), model, layout, per_epoch=None)
    worker = make_algorithm(parse_plan("s3gd").allreduce, server, layout)
    worker.gradient.memory.zero_()
    worker.gradient.flat_parameters[0].fill_(1.0)
    worker.contribute(1.0, 1.0, update_of(1))
    assert not torch.equal(worker.weights.memory, worker.average.memory)
    worker.skip()
    assert torch.equal(worker.weights.memory, worker.average.memory)
    assert not worker.payload.memory.any()


@pytest.mark.slow
def test_a_short_minibatch_is_weighted_by_its_size():
    """An epoch of 96 samples is 10 minibatches, the last of 6, so that with one worker in ten each update has one."""
    job = tiny_job(batch_size=10, sampling="epoch", optimizer=decaying)
    ours, theirs = (trained(each, job, n=10, updates=12) for each in ("all_reduce", "bsp"))
    assert largest_relative_difference(parameters_of(ours.model), parameters_of(theirs.model)) < 1e-12


@parametrize_few("protocol", ALGORITHMS, keep=1)
def test_an_epoch_uses_every_sample_once_with_a_partial_last_iteration(protocol):
    job = tiny_job(sampling="epoch")
    run = pl.train(job, protocol=protocol, cluster="5*exp(mean=1)", stop="epochs=2")
    assert run.history.totals.applied == 24
    assert [record.k for record in run.history.of(pl.callbacks.UpdateMade)] == [5, 5, 5, 5, 4]


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)


SKIPPED = (1, 6)


def plain_average(job, allreduce, updates):
    """Return the average if worker 1 skips iteration 6; each step has the rate of the global workload."""
    loader, at = MinibatchLoader(job, 3, N), build_model(job, 3)
    average = parameters_of(at)
    own, velocity, workload = [average] * N, [torch.zeros_like(average)] * N, 0
    for draw in range(1, updates + 1):
        rate, present = RATE * 0.5 ** (workload // 7), [i for i in range(N) if (i, draw) != SKIPPED]
        for i in range(N):
            if i not in present:
                own[i] = average if allreduce.overlaps else own[i]
                continue
            nn.utils.vector_to_parameters(own[i].clone(), at.parameters())
            inputs, target = loader.batch(i, draw, None)
            [*gradient] = torch.autograd.grad(job.loss(at(inputs), target), at.parameters())
            velocity[i] = MOMENTUM * velocity[i] + nn.utils.parameters_to_vector(gradient)
            own[i] = (average if allreduce.overlaps else own[i]) - rate * velocity[i]
        workload += len(present)
        if allreduce.begins_sum(draw) or draw == updates:
            average = torch.stack([own[i] for i in present]).mean(0)
            own = own if allreduce.overlaps else [average] * N
    return average


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["s3gd", "local_sgd(H=1)", "local_sgd(H=4)"])
def test_a_worker_that_skips_an_iteration_keeps_the_global_schedule(protocol):
    job = tiny_job(optimizer=sgd(RATE, MOMENTUM), scheduler=halving, schedule_unit="gradient")
    ours = trained(protocol, job, updates=11, faults=[pl.Fault(worker=SKIPPED[0], draw=SKIPPED[1], kind="not_finite")])
    theirs = plain_average(job, parse_plan(protocol).allreduce, updates=11)
    assert largest_relative_difference(parameters_of(ours.model), theirs) < 1e-12


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pl.train(tiny_job(), protocol="dc_s3gd", cluster="local:4", stop="updates=1"), "has no server"),
        (lambda: checked_plan(parse_plan("all_reduce@25% >> asp"), 4, 100, 10), "type all_reduce alone"),
        (lambda: checked_plan(parse_plan("asp@25% >> dc_s3gd"), 4, 100, 10), "the other parts of this plan need one"),
        (lambda: checked_plan(parse_plan("all_reduce + elastic"), 4, 100, 10), "type all_reduce alone"),
        (lambda: checked_plan(parse_plan("dc_s3gd + staleness_lr(C=1)"), 4, 100, 10), "or add to bsp or asp"),
        (lambda: checked_plan(parse_plan("s3gd + dc_s3gd"), 4, 100, 10), "dc_s3gd is s3gd with its correction"),
        (lambda: pl.dc_s3gd(lambda0=-0.1), "lambda0=-0.1"),
        (lambda: pl.dc_s3gd(lambda0=float("nan")), "lambda0=nan"),
        (lambda: parse_plan("dc_s3gd(lambda0=much)"), "lambda0='much'"),
        (lambda: pl.local_sgd(H=0), "H=0 is not a whole number in [1, inf)"),
        (lambda: pl.local_sgd(H=10**400), "is not a whole number in [1, inf)"),
        (lambda: pl.local_sgd(H=4, outer="adam"), "known: delayed_nesterov, nesterov, sgd"),
        (lambda: pl.local_sgd(H=4, outer="sgd"), "type sgd(lr=...)"),
        (lambda: pl.local_sgd(H=4, outer="nesterov(lr=0)"), "lr=0 is not a number in (0, inf)"),
        (lambda: pl.local_sgd(H=4, outer="nesterov(momentum=1)"), "momentum=1 is not a number in [0, 1)"),
        (lambda: pl.plans.AllReduceConfig(sums="gradients", outer=OuterSGD(1.0)), "give sums='updates'"),
        (lambda: pl.plans.AllReduceConfig(sums=[]), "sums=[], expected"),
        (lambda: pl.plans.AllReduceConfig(sums="updates", lag="yes"), "lag='yes', expected"),
        (lambda: pl.plans.AllReduceConfig(sums="updates", lag=1, correction="dc_s3gd"), "correction='dc_s3gd'"),
        (
            lambda: pl.plans.AllReduceConfig(sums="updates", lag=1, correction=pl.staleness_lr(C=1)),
            "that corrects, or None",
        ),
        (lambda: pl.asp() + pl.s3gd(), "it is a protocol of its own"),
        (lambda: pl.plans.AllReduceConfig(sums="weights"), "expected 'gradients' or 'updates'"),
        (lambda: pl.plans.AllReduceConfig(sums="gradients", period=2), "give sums='updates'"),
        (lambda: pl.plans.AllReduceConfig(sums="updates", correction=DCS3GD()), "give lag=1 and period=1"),
        (
            lambda: pl.plans.AllReduceConfig(sums="updates", lag=1, period=2, correction=DCS3GD()),
            "give lag=1 and period=1",
        ),
        (lambda: pl.plans.AllReduceConfig(sums="gradients", lag=1), "give sums='updates'"),
        (lambda: pl.s3gd(lag=0), "lag=0 is not a whole number in [1, inf)"),
        (lambda: pl.dc_s3gd(lag=1.5), "lag=1.5, expected"),
        (lambda: pl.local_sgd(H=4, lag=-1), "lag=-1 is not a whole number in [0, inf)"),
        (lambda: pl.local_sgd(H=4, fragments=0), "fragments=0 is not a whole number in [1, inf)"),
        (lambda: pl.local_sgd(H=4, fragments=3), "expected a divisor of H=4; type for example H=6"),
        (lambda: pl.plans.AllReduceConfig(sums="updates", period=4, fragments=8), "expected a divisor of the period 4"),
        (lambda: trained("local_sgd(H=8, fragments=8)", tiny_job()), "give at most fragments="),
        (lambda: pl.asp() + pl.dc_s3gd(lag=2), "it is a protocol of its own"),
        (lambda: parse_plan("asp + dc_s3gd(lag=2)"), "lag"),
        (
            lambda: pl.train(
                tiny_job(), protocol="s3gd", cluster="4*exp(mean=1)", stop="updates=1", measure_steps=True
            ),
            "an update has no single step",
        ),
    ],
)
def test_invalid_combinations_are_refused_with_a_remedy(call, says):
    with pytest.raises(pl.UsageError, match=re.escape(says)):
        call()


def test_dc_s3gd_after_a_plus_adds_only_its_correction():
    phase = pl.asp() + pl.dc_s3gd(lambda0=0.3)
    assert phase.allreduce is None
    assert phase.compensators == (DCS3GD(0.3),)
    assert parse_plan(str(phase)) == pl.plans.Plan((phase,))
