"""Equal bits of two runs whose workers deliver their gradients in opposite orders."""

import pytest
import torch

import paceline as pl
from paceline.core.records import GradientArrived
from rank_threads import run
from ranks import flat
from tiny_jobs import batch_norm_net, tiny_job

N, UPDATES = 4, 8
JOB = {"model": batch_norm_net, "clip_norm": 0.1}


def cluster_of(times):
    """Return a cluster whose workers sleep for these times, in units that decide the order of arrival."""
    return pl.Cluster(N, timing=[pl.timing.Deterministic(value_s=0.03 * each) for each in times])


def orders(arrivals):
    """Return the order of the workers in each update."""
    workers = [each.worker for each in arrivals]
    return {tuple(workers[first : first + N]) for first in range(0, N * UPDATES, N)}


def trained_by_processes(times, protocol, **cluster):
    local = pl.LocalCluster(N, slowness=cluster_of(times), **cluster)
    trained = pl.train(tiny_job(**JOB), protocol=protocol, cluster=local, stop=f"updates={UPDATES}", seed=5)
    return flat(trained.model.state_dict()), orders(trained.history.of(GradientArrived))


def trained_by_ranks(times, protocol, **torchrun):
    settings = {"slowness": cluster_of(times), **torchrun}
    ranks = N + torchrun.get("server", True)  # at rank 0, which computes nothing
    end = run(ranks, tiny_job(**JOB), settings, protocol=protocol, stop=f"updates={UPDATES}")[0]
    return flat(end.parameters), orders(end.of(GradientArrived))


def check(train, protocol="bsp", **options):
    (first, one), (second, other) = (train(times, protocol, **options) for times in ((1, 2, 3, 4), (4, 3, 2, 1)))
    assert one.isdisjoint(other), "gradients arrived in other orders"
    return torch.equal(first, second)


@pytest.mark.processes
def test_bits_do_not_depend_on_the_order_of_arrival():
    assert check(trained_by_processes)


@pytest.mark.slow
def test_they_may_where_gradients_are_added_as_they_arrive():
    assert not check(trained_by_processes, deterministic=False)


@pytest.mark.parametrize("torchrun", [{}, {"shards": 2}, {"server": False}], ids=str)
def test_neither_on_ranks(torchrun):
    assert check(trained_by_ranks, **torchrun)
