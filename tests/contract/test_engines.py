"""The same training, said in different ways: a plain loop, limits of protocols, the other engine."""

import pytest
import torch

import paceline as pl
from arrival_replay import arrival_replay
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Apply
from paceline.core.records import UpdateMade
from paceline.engines.local import LocalWorkers
from paceline.engines.loop import RunLoop
from paceline.protocols.protocol import as_plan
from paceline.server.outer_optimizer import server_job
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.worker.local_steps import make_replica
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model
from selections import parametrize_few
from tiny_jobs import batch_norm_net, largest_relative_difference, parameters_of, plain_loop, sgd, tiny_job

CLUSTER = pl.Cluster(4, timing=pl.timing.Exponential(1.0))
EXACT = 1e-12


def trained(protocol, cluster=CLUSTER, updates=15, **changes):
    return pl.train(tiny_job(**changes), protocol=protocol, cluster=cluster, stop=pl.Stop(updates=updates), seed=3)


def decisions(result):
    return [(record.now_s, record.version, record.k, record.staleness) for record in result.history.of(UpdateMade)]


@parametrize_few(
    ("make_cluster", "n"),
    [
        (pl.Cluster, 1),
        (pl.Cluster, 3),
        pytest.param(pl.LocalCluster, 1, marks=pytest.mark.slow),
        (pl.LocalCluster, 3),
    ],
    keep=1,
)
def test_bsp_is_a_plain_loop_over_the_same_minibatches(make_cluster, n):
    result = trained(pl.bsp(), make_cluster(n))
    plain = plain_loop(tiny_job(), seed=3, n=n, updates=15)
    assert largest_relative_difference(parameters_of(result.model), parameters_of(plain)) < EXACT


def test_k_sync_of_all_workers_is_bsp():
    ours, bsp = trained(pl.k_sync(k=4)), trained(pl.bsp())
    assert decisions(ours) == decisions(bsp)
    assert torch.equal(parameters_of(ours.model), parameters_of(bsp.model))


@parametrize_few("protocol", [pl.k_async(k=1), pl.k_batch_async(k=1), pl.ssp(lead=10_000)], ids=str, keep=1)
def test_one_gradient_of_any_staleness_is_asp(protocol):
    ours, asp = trained(protocol), trained(pl.asp())
    assert decisions(ours) == decisions(asp)
    assert torch.equal(parameters_of(ours.model), parameters_of(asp.model))


@parametrize_few("protocol", [pl.bsp(), pl.asp(), pl.k_sync(k=1), pl.ringmaster(r=1, stops=True)], ids=str, keep=1)
def test_one_worker_is_sgd(protocol):
    result = trained(protocol, pl.Cluster(1))
    plain = plain_loop(tiny_job(), seed=3, n=1, updates=15)
    assert largest_relative_difference(parameters_of(result.model), parameters_of(plain)) < EXACT


def test_runs_are_determined_by_the_seed():
    first, again = trained(pl.k_async(k=2)), trained(pl.k_async(k=2))
    assert decisions(first) == decisions(again)
    assert torch.equal(parameters_of(first.model), parameters_of(again.model))
    other = pl.train(tiny_job(), protocol=pl.k_async(k=2), cluster=CLUSTER, stop=pl.Stop(updates=15), seed=4)
    assert decisions(other) != decisions(first)


def pieces(job, seed, n, protocol, updates):
    model = build_model(job, seed)
    layout = FlatLayout(model)
    server = ParameterServer(server_job(job, as_plan(protocol).local_steps), model, layout, None)
    stop = pl.Stop(updates=updates)
    return Coordinator(as_plan(protocol), workers=n, stop=stop), server, layout


@parametrize_few(
    "protocol",
    [
        pl.bsp(),
        pl.k_sync(k=2),
        pl.pull(k=4),
        pl.k_async(k=2),
        pl.asp(),
        pl.ssp(lead=1),
        pl.asp() + pl.plans.chain(pl.staleness_lr(C=0.01), pl.dc_asgd(lambda0=2, m=0.95)),
        pl.k_async(k=2) + pl.staleness_weight() + pl.dc_s3gd(),
        pl.k_sync(k=2) + pl.local_steps(H=3, outer="nesterov(lr=0.7, momentum=0.9)"),
        pl.ringmaster(r=1) + pl.local_steps(H=2),
        pl.k_async(k=2) + pl.staleness_weight() + pl.local_steps(seconds=0.01),
    ],
    keep=1,
    ids=str,
)
def test_two_engines_with_the_same_arrivals_produce_the_same_run(protocol):
    job, n, seed, updates = tiny_job(model=batch_norm_net), 3, 5, 20
    coordinator, local_server, layout = pieces(job, seed, n, protocol, updates)
    events, local_commands = [], []

    def record(now, event, commands):
        if event is not None:
            events.append(event)
        local_commands.extend(commands)

    local_steps = as_plan(protocol).local_steps
    workers = LocalWorkers(
        job=job, cluster=pl.LocalCluster(n), seed=seed, server=local_server, layout=layout, local_steps=local_steps
    )
    with RunLoop(workers, workers.parameters, workers.clock) as loop:
        loop.run(coordinator, record)
    assert type(local_server.state) is FlatBuffers  # no longer memory that the processes share

    coordinator, server, _ = pieces(job, seed, n, protocol, updates)
    virtual_commands = []
    replica = make_replica(job, seed, n, local_steps=local_steps)
    replay = arrival_replay(pl.Cluster(n), replica, server, events)
    replay.run(coordinator, lambda now, event, commands: virtual_commands.extend(commands))

    assert virtual_commands == local_commands
    assert sum(isinstance(command, Apply) for command in local_commands) == updates
    ours, theirs = parameters_of(server.model), parameters_of(local_server.model)
    assert largest_relative_difference(ours, theirs) < EXACT
    for mine, other in zip(server.model.buffers(), local_server.model.buffers(), strict=True):
        assert torch.allclose(mine, other, rtol=EXACT)


def test_bsp_averages_batch_norm_statistics_and_counts_batches():
    job = tiny_job(model=batch_norm_net, optimizer=sgd(lr=0.0))
    result = pl.train(job, protocol=pl.bsp(), cluster=CLUSTER, stop=pl.Stop(updates=1), seed=3)
    replica = Replica(job, 3, 4)
    start, change = replica.layout.allocate(), replica.layout.allocate()
    ParameterServer(job, build_model(job, 3), replica.layout, None).publish(start)
    means = []
    for worker in range(4):
        replica.gradient(worker, 1, None, start, change)
        means.append(start.buffers[0] + change.buffers[0])
    assert torch.allclose(result.model[1].running_mean, torch.stack(means).mean(dim=0), rtol=EXACT)
    assert result.model[1].num_batches_tracked == 1  # as worker 0 counts
