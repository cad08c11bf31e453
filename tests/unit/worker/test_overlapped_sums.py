"""Sums that overlap gradients, and sums of fragments, against a plain loop."""

import re

import pytest
import torch
from torch import nn

import paceline as pl
from allreduce_runs import MOMENTUM, RATE, N, decaying, trained
from paceline.catalogue.parser import parse_plan
from paceline.core.records import VersionEvaluated
from paceline.tensors.flat_buffers import FlatLayout
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from selections import parametrize_few
from tiny_jobs import dataset, largest_relative_difference, parameters_of, sgd, tiny_job


def fragments_of(model, count):
    """Return which parameters are in each fragment, as masks."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    layouts = FlatLayout(model, count).shard_layouts
    return [
        torch.cat([torch.full((size,), number in layout.parameters) for number, size in enumerate(sizes)])
        for layout in layouts
    ]


def plain_lag(job, allreduce, updates):
    """Return the mean of the workers' parameters, each of which is the average plus its steps of unfinished sums."""
    loader, model = MinibatchLoader(job, 3, N), build_model(job, 3)
    average = parameters_of(model)
    at, velocity = [average] * N, [torch.zeros_like(average)] * N
    steps = [{} for _ in range(N)]  # of each worker: iteration and step, where it is not in a completed sum
    outer_momentum = torch.zeros_like(average)
    fragments, interval = fragments_of(model, allreduce.fragments), allreduce.period // allreduce.fragments
    begun = interval  # iteration of the oldest sum under way

    def own(worker):
        return sum(steps[worker].values(), torch.zeros_like(average))

    def end_sums(iteration):
        nonlocal average, outer_momentum, begun
        while begun + max(0, allreduce.lag - 1) <= iteration:
            fragment = fragments[(begun // interval - 1) % len(fragments)].double()
            move = torch.zeros_like(average)
            for each in steps:
                for draw in [draw for draw in each if draw <= begun]:
                    move += each[draw] * fragment / N
                    each[draw] = each[draw] * (1 - fragment)
            if allreduce.outer:
                kept = 1 - fragment * (1 - allreduce.outer.momentum)
                outer_momentum = kept * outer_momentum + move
                move = allreduce.outer.lr * (move + allreduce.outer.momentum * outer_momentum * fragment)
            average = average + move
            begun += interval

    for draw in range(1, updates + 1):
        end_sums(draw - 1)
        for i in range(N):
            if allreduce.lag == 0:
                at[i] = average + own(i)
            nn.utils.vector_to_parameters(at[i].clone(), model.parameters())
            inputs, target = loader.batch(i, draw, None)
            gradient = torch.cat(
                [each.flatten() for each in torch.autograd.grad(job.loss(model(inputs), target), model.parameters())]
            )
            base = average + own(i)
            distance = base - at[i]
            if allreduce.correction and distance.norm() > 1e-12:
                correction = gradient * gradient * distance
                gradient = gradient + allreduce.correction.lambda0 * gradient.norm() / correction.norm() * correction
            velocity[i] = MOMENTUM * velocity[i] + gradient
            steps[i][draw] = -RATE * velocity[i]
            at[i] = base - RATE * velocity[i]
    end_sums(updates)
    return average + sum(own(i) for i in range(N)) / N


@parametrize_few("lag", [2, 1, 0, 5], keep=1)
@parametrize_few(
    "protocol", ["dc_s3gd(lag={})", "local_sgd(H=3, lag={})", "local_sgd(H=2, lag={}, outer=nesterov)"], keep=1
)
def test_a_worker_is_at_the_average_plus_its_own_steps_that_are_still_summed(protocol, lag):
    if lag == 0 and "dc_s3gd" in protocol:
        pytest.skip("DC-S3GD overlaps sums")
    job, protocol = tiny_job(optimizer=sgd(RATE, MOMENTUM)), protocol.format(lag)
    ours = trained(protocol, job, updates=19)
    theirs = plain_lag(job, parse_plan(protocol).allreduce, updates=19)
    assert largest_relative_difference(parameters_of(ours.model), theirs) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 0, 6])
@pytest.mark.parametrize("knobs", ["H=2, fragments=2", "H=6, fragments=3", "H=4, fragments=2, outer=nesterov"])
def test_each_fragment_has_sums_of_its_own(knobs, lag):
    job = tiny_job(model=deep, optimizer=sgd(RATE, MOMENTUM))
    protocol = f"local_sgd({knobs}, lag={lag})"
    ours = trained(protocol, job, updates=19)
    theirs = plain_lag(job, parse_plan(protocol).allreduce, updates=19)
    assert largest_relative_difference(parameters_of(ours.model), theirs) < 1e-12
    whole = trained(re.sub(r", fragments=\d", "", protocol), job, updates=19)
    assert largest_relative_difference(parameters_of(whole.model), theirs) > 1e-6


def deep():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


EVALUATED = (
    "local_sgd(H=4, outer=nesterov)",
    "local_sgd(H=4, lag=4)",
    "local_sgd(H=4, fragments=2)",
    "local_sgd(H=4, fragments=2, outer=nesterov)",
    "dc_s3gd(lag=3)",
)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", EVALUATED)
def test_evaluations_between_two_sums_change_nothing(protocol):
    job = tiny_job(optimizer=decaying, eval_data=dataset(20))
    plain, evaluated = (
        pl.train(job, protocol=protocol, cluster=pl.Cluster(3), stop="updates=24", evaluate_every=every, seed=3)
        for every in (None, "updates=3")
    )
    assert len(evaluated.history.of(VersionEvaluated)) > 6
    assert largest_relative_difference(parameters_of(evaluated.model), parameters_of(plain.model)) < 1e-12
