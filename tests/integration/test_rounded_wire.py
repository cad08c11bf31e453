"""Ranks that send rounded numbers, as threads: the same training, within that rounding."""

import torch
import torch.nn.functional as F

import paceline as pl
from paceline.core.records import GradientArrived
from rank_threads import run
from rounding import UPDATES, plain_loop_with_rounding, single_job
from tiny_jobs import largest_relative_difference, parameters_of


def flat(parameters):
    return torch.cat([tensor.reshape(-1) for tensor in parameters.values()])


def test_bf16_on_the_wire_is_training_with_rounded_numbers_and_replays(tmp_path):
    job = single_job()
    stop = f"updates={UPDATES}"
    ends = run(3, job, {"wire": "bf16"}, protocol="bsp", stop=stop, out=tmp_path / "run")
    simulated = pl.train(job, protocol="bsp", cluster=pl.Cluster(2), stop=stop, seed=1)
    ours, rounded = flat(ends[0].parameters), plain_loop_with_rounding(job, seed=1, n=2)
    exact = parameters_of(simulated.model)
    assert largest_relative_difference(ours, rounded) < 1e-5
    assert 1e-4 < largest_relative_difference(ours, exact) < 2e-2
    assert all(
        torch.equal(flat(end.parameters), ours) for end in ends
    )  # the final parameters are not rounded on any worker
    assert pl.replay(tmp_path / "run").is_same


def steep(outputs, target):
    return 1e9 * F.cross_entropy(outputs, target)


def test_gradients_that_overflow_on_the_wire_are_rejected():
    [end, *_] = run(3, single_job(loss=steep), {"wire": "float16"}, protocol="asp", stop="updates=500")
    arrivals = end.of(GradientArrived)
    assert end.stopped_by == "not_finite"
    assert {record.reason for record in arrivals} == {"not finite"}
