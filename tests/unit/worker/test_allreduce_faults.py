"""All-reduce workers that fail, rejoin, or continue in a resumed run."""

import numpy as np
import pytest
import torch

import paceline as pl
from allreduce_runs import ALGORITHMS, MOMENTUM, RATE
from paceline.catalogue.parser import parse_plan
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from paceline.worker.allreduce import make_algorithm
from paceline.worker.torch_utils import build_model
from selections import each_value_once, parametrize_few
from tiny_jobs import (
    batch_norm_net,
    largest_relative_difference,
    parameters_of,
    sgd,
    tiny_job,
    update_of,
)


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "sampling"), each_value_once(ALGORITHMS, ["replacement", "epoch"]))
def test_a_resumed_run_is_bit_identical_and_replays(protocol, sampling, tmp_path):
    job = tiny_job(sampling=sampling, model=batch_norm_net)
    cluster = pl.Cluster(4, pl.timing.Exponential(1.0), network=pl.timing.Network(latency_s=0.5))
    common = {"protocol": protocol, "cluster": cluster, "seed": 1, "checkpoint_every": "updates=4"}
    whole = pl.train(job, stop="updates=14", out=tmp_path / "whole", **common)
    pl.train(job, stop="updates=7", out=tmp_path / "parts", **common)
    parts = pl.train(job, stop="updates=14", resume=tmp_path / "parts", **common)
    assert torch.equal(parameters_of(parts.model), parameters_of(whole.model))
    made = [
        [(record.now_s, record.loss) for record in run.history.of(pl.callbacks.UpdateMade)] for run in (parts, whole)
    ]
    assert made[0] == made[1]
    assert pl.replay(tmp_path / "parts").is_same


@parametrize_few(("protocol", "kind"), each_value_once(ALGORITHMS, ["die", "hang", "not_finite"]), keep=1)
def test_the_other_workers_continue_after_a_worker_fails(protocol, kind):
    fault = pl.Fault(worker=2, draw=5, kind=kind)
    run = pl.train(
        tiny_job(),
        protocol=protocol,
        cluster=pl.Cluster(4, pl.timing.Deterministic(1.0), faults=[fault]),
        stop="updates=25",
        worker_timeout_s=10.0,
    )
    made = [record.k for record in run.history.of(pl.callbacks.UpdateMade)]
    assert made[:6] == ([4, 4, 4, 4, 3, 4] if kind == "not_finite" else [4, 4, 4, 4, 3, 3])
    [dropped] = [record for record in run.history.of(pl.callbacks.GradientArrived) if not record.used] or [None]
    assert (dropped is not None) == (kind == "not_finite")
    assert dropped is None or dropped.worker == 2
    losses = [record.loss for record in run.history.of(pl.callbacks.UpdateMade)]
    assert np.mean(losses[-10:]) < np.mean(losses[:5])


@parametrize_few(("protocol", "worker"), each_value_once(ALGORITHMS, [1, 3]), keep=1)
def test_a_worker_that_rejoins_restarts_from_the_average(protocol, worker):
    cluster = pl.Cluster(
        4, pl.timing.Deterministic(1.0), faults=[pl.Fault(worker=worker, draw=3, kind="die", back_after_s=7.5)]
    )
    run = pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop="updates=15")
    assert [record.k for record in run.history.of(pl.callbacks.UpdateMade)][:14] == [4, 4, *[3] * 8, 4, 4, 4, 4]
    assert run.history.totals.dropped == 0
    assert run.stopped_by is pl.results.Outcome.UPDATES


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ALGORITHMS)
def test_additional_workers_of_a_resumed_run_participate_at_once(protocol, tmp_path):
    common = {"protocol": protocol, "seed": 1}
    pl.train(tiny_job(), cluster="2*deterministic(value=1)", stop="seconds=5.5", out=tmp_path / "run", **common)
    more = {"resume": tmp_path / "run", "allow_change": True}
    run = pl.train(tiny_job(), cluster="4*deterministic(value=1)", stop="updates=10", **more, **common)
    assert [record.k for record in run.history.of(pl.callbacks.UpdateMade)] == [2] * 5 + [4] * 5
    assert run.history.totals.dropped == 0


def test_a_worker_with_non_finite_gradients_is_named_and_not_awaited():
    faults = [pl.Fault(worker=2, draw=draw, kind="not_finite") for draw in range(3, 20)]
    run = pl.train(tiny_job(), protocol="dc_s3gd", cluster=pl.Cluster(4, faults=faults), stop="updates=100")
    assert run.stopped_by is pl.results.Outcome.NOT_FINITE
    assert "10 gradients in a row of worker 2" in run.reason
    assert [record.k for record in run.history.of(pl.callbacks.UpdateMade)] == [4, 4, *[3] * 9]


@parametrize_few("protocol", ALGORITHMS, keep=1)
def test_an_iteration_without_finite_gradients_is_repeated(protocol):
    faults = [pl.Fault(worker=worker, draw=3, kind="not_finite") for worker in range(4)]
    run = pl.train(tiny_job(), protocol=protocol, cluster=pl.Cluster(4, faults=faults), stop="updates=6")
    assert [record.k for record in run.history.of(pl.callbacks.UpdateMade)] == [4] * 6
    assert run.history.totals.dropped == 4


@pytest.mark.parametrize(("protocol", "keeps"), [("all_reduce", False), ("s3gd", True), ("local_sgd(H=3)", True)])
def test_a_worker_restored_from_another_average_keeps_its_own_momentum(protocol, keeps):
    job, allreduce = tiny_job(optimizer=sgd(RATE, MOMENTUM)), parse_plan(protocol).allreduce
    workers = []
    for value in (1.0, 2.0, 3.0):
        model = build_model(job, 3)
        layout = FlatLayout(model)
        worker = make_algorithm(allreduce, ParameterServer(job, model, layout, per_epoch=None), layout)
        worker.gradient.memory.zero_()
        worker.gradient.flat_parameters[0].fill_(value)
        worker.contribute(1.0, 1.0, update_of(1))
        worker.begin_sum(0)
        worker.apply_sum(worker.payload, 1.0, update_of(1), fragment=0)
        workers.append(worker)
    first, survivor, newcomer = workers
    survivor.restore_from(first.server.state_dict(), survivor.own_state())
    newcomer.restore_from(first.server.state_dict())
    assert (momentum_of(first), momentum_of(survivor)) == (1.0, 2.0 if keeps else 1.0)
    assert momentum_of(newcomer) == 1.0
    for worker in (survivor, newcomer):
        assert torch.equal(worker.average.memory, first.average.memory)
        assert torch.equal(worker.weights.memory, first.average.memory)


def momentum_of(worker):
    [momentum] = {float(state["momentum_buffer"].mean()) for state in worker.server.optimizer.state.values()}
    return momentum


def test_a_checkpoint_from_before_fragments_has_no_steps_apart():
    job, allreduce = tiny_job(optimizer=sgd(RATE, MOMENTUM)), parse_plan("local_sgd(H=3)").allreduce
    workers = []
    for _ in range(2):
        model = build_model(job, 3)
        layout = FlatLayout(model)
        workers.append(make_algorithm(allreduce, ParameterServer(job, model, layout, per_epoch=None), layout))
    first, second = workers
    for number in range(1, 3):
        first.gradient.flat_parameters[0].fill_(1.0)
        first.contribute(1.0, 1.0, update_of(number))
    second.load_state_dict({**first.state_dict(), "own": []})
    for worker in workers:
        worker.collect_steps(0)
    assert float(first.payload.flat_parameters[0].abs().min()) > 0
    assert largest_relative_difference(second.payload.flat_parameters[0], first.payload.flat_parameters[0]) < 1e-12
