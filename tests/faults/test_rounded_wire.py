"""Ranks that send rounded numbers: the same training, within that rounding."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from faults.ranks import run
from paceline.core.records import GradientArrived
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from tiny_jobs import dataset, largest_relative_difference, parameters_of, small_net, tiny_job

UPDATES = 20


def single_job(**changes):
    return tiny_job(**{"model": partial(small_net, torch.float32), "data": dataset(dtype=torch.float32), **changes})


def flat(parameters):
    return torch.cat([tensor.reshape(-1) for tensor in parameters.values()])


def plain_loop_with_rounding(job, seed, n):
    """Synchronous SGD on parameters and gradients rounded to bf16, with masters that are not."""
    master, replica = build_model(job, seed), build_model(job, seed)
    optimizer = job.optimizer(master.parameters())
    loader = MinibatchLoader(job, seed, n)
    for draw in range(1, UPDATES + 1):
        optimizer.zero_grad()
        for ours, theirs in zip(replica.parameters(), master.parameters(), strict=True):
            ours.data = theirs.data.bfloat16().float()
            theirs.grad = torch.zeros_like(theirs)
        for worker in range(n):
            inputs, target = loader.batch(worker, draw, None)
            replica.zero_grad()
            job.loss(replica(inputs), target).backward()
            for ours, theirs in zip(replica.parameters(), master.parameters(), strict=True):
                theirs.grad += ours.grad.bfloat16().float() / n
        optimizer.step()
    return parameters_of(master)


def test_bf16_on_the_wire_is_training_with_rounded_numbers_and_replays(tmp_path):
    job = single_job()
    stop = f"updates={UPDATES}"
    ends = run(3, job, {"wire": "bf16"}, protocol="bsp", stop=stop, out=tmp_path / "run")
    simulated = pl.train(job, protocol="bsp", cluster=pl.Cluster(2), stop=stop, seed=1)
    ours, rounded = flat(ends[0].parameters), plain_loop_with_rounding(job, seed=1, n=2)
    exact = parameters_of(simulated.model)
    assert largest_relative_difference(ours, rounded) < 1e-5
    assert 1e-4 < largest_relative_difference(ours, exact) < 2e-2
    assert all(torch.equal(flat(end.parameters), ours) for end in ends)  # what everybody has at the end is not rounded
    assert pl.replay(tmp_path / "run").is_same


def steep(outputs, target):
    return 1e9 * F.cross_entropy(outputs, target)


@pytest.mark.slow
def test_gradients_that_overflow_on_the_wire_are_rejected():
    [end, *_] = run(3, single_job(loss=steep), {"wire": "float16"}, protocol="asp", stop="updates=500")
    arrivals = end.of(GradientArrived)
    assert end.stopped_by == "not_finite"
    assert {record.reason for record in arrivals} == {"not finite"}
