"""Ranks without a server that send compressed messages, as threads: against a plain loop with the same rounding."""

import pytest
import torch

import paceline as pl
from paceline.core.records import GradientArrived, WorkerLost
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from rank_threads import ranks, run
from ranks import flat
from rounding import single_job
from selections import parametrize_few
from tiny_jobs import dataset, largest_relative_difference, parameters_of, sgd

N, UPDATES, RATE = 3, 24, 0.05


def rounded(values):
    """Return values as multiples of a 127th of the largest in their block."""
    blocks = [block.abs().max() / 127 for block in values.split(256)]
    return torch.cat([(block / step).round() * step for block, step in zip(values.split(256), blocks, strict=True)])


def plain_loop_with_error_feedback(job):
    """Return the parameters after synchronous SGD with the mean of rounded gradients."""
    model, loader = build_model(job, 1), MinibatchLoader(job, 1, N)
    parameters, left_out = parameters_of(model), [0.0] * N
    for draw in range(1, UPDATES + 1):
        mean = torch.zeros_like(parameters)
        for worker in range(N):
            torch.nn.utils.vector_to_parameters(parameters.clone(), model.parameters())
            inputs, target = loader.batch(worker, draw, None)
            gradient = torch.autograd.grad(job.loss(model(inputs), target), model.parameters())
            owed = torch.cat([each.flatten() for each in gradient]) + left_out[worker]
            sent = rounded(owed)
            left_out[worker] = owed - sent
            mean += sent / N
        parameters = parameters - RATE * mean
    return parameters


@pytest.mark.slow
def test_gradients_are_rounded_and_what_a_message_leaves_out_is_in_the_next_one():
    job = single_job(optimizer=sgd(RATE))
    settings = {"protocol": "all_reduce", "stop": f"updates={UPDATES}"}
    ends = run(N, job, {"wire": "int8"}, **settings)
    assert all(torch.equal(flat(end.parameters), flat(ends[0].parameters)) for end in ends)
    theirs = plain_loop_with_error_feedback(job)
    simulated, exact = (
        parameters_of(pl.train(job, cluster=pl.Cluster(N, network=network), seed=1, **settings).model)
        for network in (pl.timing.Network(wire="int8"), pl.timing.Network())
    )
    assert largest_relative_difference(flat(ends[0].parameters), theirs) < 1e-6
    assert largest_relative_difference(simulated, theirs) < 1e-6
    assert largest_relative_difference(exact, theirs) > 1e-5


@parametrize_few(
    ("protocol", "wire"),
    [
        ("all_reduce", "int8"),
        ("dc_s3gd(lag=2)", "int8"),
        ("local_sgd(H=4, outer=nesterov)", "int4"),
        ("local_sgd(H=4, fragments=2, lag=1)", "int8"),
        ("local_sgd(H=4, lag=4)", "top_k(share=0.3)"),
    ],
    keep=1,
)
def test_every_protocol_trains_as_in_the_simulation(protocol, wire):
    job = single_job(optimizer=sgd(RATE), eval_data=dataset(20, dtype=torch.float32))
    settings = {"protocol": protocol, "stop": f"updates={UPDATES}", "evaluate_every": "updates=5"}
    faults = [pl.Fault(worker=1, draw=8, kind="not_finite")]
    ends = run(N, job, {"wire": wire, "faults": faults}, **settings)
    simulated, exact = (
        parameters_of(pl.train(job, cluster=pl.Cluster(N, network=network, faults=faults), seed=1, **settings).model)
        for network in (pl.timing.Network(wire=wire), pl.timing.Network())
    )
    assert largest_relative_difference(flat(ends[0].parameters), simulated) < 1e-6
    assert all(torch.equal(flat(end.parameters), flat(ends[0].parameters)) for end in ends)
    limit = {"int8": 0.01, "int4": 0.1, "top_k(share=0.3)": 0.2}[wire]
    assert 1e-6 < largest_relative_difference(flat(ends[0].parameters), exact) < limit


@pytest.mark.slow
def test_ranks_that_are_left_go_on_with_the_same_parameters():
    torchrun = {"wire": "int8", "faults": [pl.Fault(worker=2, draw=9)], "min_workers": 1}
    with ranks(N, single_job(), torchrun, protocol="local_sgd(H=2, fragments=2)", stop="updates=30") as job:
        job.start_all()
        ends = [job.end(rank) for rank in (0, 1)]
        assert job.faults("die") == 1
    assert [each.worker for each in ends[0].of(WorkerLost)] == [2]
    assert torch.equal(flat(ends[0].parameters), flat(ends[1].parameters))
    losses = [each.loss for each in ends[0].of(GradientArrived) if each.used]
    assert max(losses[-20:]) < 2.0  # log(3) = 1.1 before training
