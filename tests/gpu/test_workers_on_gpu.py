"""Worker processes that share one GPU: their parameters, every protocol, losses, checkpoints."""

from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from end_when import FOREVER, EndWhen
from gpu import DEVICE, on_gpu
from paceline.core.records import WorkerJoined, WorkerLost, WorkInterrupted
from ranks import flat
from tiny_jobs import batch_norm_net, largest_relative_difference, small_net, tiny_job

pytestmark = on_gpu
UPDATES = 12
ROUNDING = 1e-12  # float64
CYCLES = 20_000_000  # of a kernel that waits, about 10 ms
PROTOCOLS = [
    "bsp",
    "backup(k=1)",
    "k_sync(k=2)",
    "k_batch_sync(k=2)",
    "pull(k=2)",
    "balanced(m=4)",
    "asp",
    "ssp(lead=2)",
    "k_async(k=2)",
    "k_batch_async(k=2)",
    "dbw",
    "adasync(K_0=1)",
    "patient",
    "auto",
    "asp + dc_asgd(lambda0=0.1)",
    "bsp + local_steps(H=3)",
    "bsp@updates=6 >> asp",
]


def trained(protocol="bsp", workers=2, job=None, updates=UPDATES, faults=(), respawn=False, **settings):
    cluster = pl.LocalCluster(workers, device=DEVICE, faults=faults, respawn=respawn)
    return pl.train(
        job or tiny_job(), protocol=protocol, cluster=cluster, stop=f"updates={updates}", seed=1, **settings
    )


def simulated(workers, job):
    return pl.train(job, protocol="bsp", cluster=pl.Cluster(workers), stop=f"updates={UPDATES}", seed=1)


def distance(ours, theirs):
    return largest_relative_difference(*(flat(each.model.state_dict()) for each in (ours, theirs)))


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("model", [small_net, batch_norm_net])
def test_the_parameters_are_those_of_the_cpu(workers, model):
    job = tiny_job(model=model, clip_norm=0.5)
    assert distance(trained(workers=workers, job=job), simulated(workers, job)) < ROUNDING


def test_adamw_steps_as_on_the_cpu():
    job = tiny_job(optimizer=partial(torch.optim.AdamW, lr=0.01))
    assert distance(trained(job=job), simulated(2, job)) < ROUNDING


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_trains(protocol):
    result = trained(protocol, workers=4)
    assert result.stopped_by == "updates"
    assert torch.isfinite(flat(result.model.state_dict())).all()


class Late(torch.autograd.Function):
    """Identity whose gradient is complete long after the backward pass has returned on the host."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if gradient.is_cuda:
            torch.cuda._sleep(CYCLES)
        return gradient.clone()


class LateNet(nn.Module):
    """Network whose parameters all get their gradients late."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4)).double()
        self.last = nn.Linear(5, 3).double()

    def forward(self, x):
        for layer in self.layers:
            x = Late.apply(torch.tanh(layer(x)))
        return Late.apply(self.last(x))


@pytest.mark.parametrize("protocol", ["bsp", "k_sync(k=3)"])
def test_no_gradient_is_read_before_it_is_complete(protocol):
    job = tiny_job(model=LateNet)
    assert distance(trained(protocol, workers=3, job=job), simulated(3, job)) < ROUNDING


def test_work_that_is_no_longer_needed_ends_between_two_layers():
    slow = pl.Cluster(2, (pl.timing.Deterministic(0.001), pl.timing.Deterministic(0.5)))
    cluster = pl.LocalCluster(2, device=DEVICE, slowness=slow)
    job = tiny_job(model=LateNet)
    result = pl.train(job, protocol="k_sync(k=1)", cluster=cluster, stop="updates=40", seed=1)
    assert {each.worker for each in result.history.of(WorkInterrupted)} >= {1}


@pytest.mark.parametrize("respawn", [True, False])
def test_a_worker_is_killed_while_its_kernels_run(respawn):
    is_enough = EndWhen(lambda seen: seen.updates > 10 and seen.joined == [1] * respawn and seen.used_since[0] > 4)
    cluster = pl.LocalCluster(3, device=DEVICE, faults=[pl.Fault(worker=1, draw=3, kind="die")], respawn=respawn)
    job = tiny_job(model=LateNet)
    result = pl.train(job, protocol="bsp", cluster=cluster, stop=FOREVER, seed=1, callbacks=[is_enough])
    assert [each.worker for each in result.history.of(WorkerLost)] == [1]
    assert [each.worker for each in result.history.of(WorkerJoined)] == [1] * respawn


@pytest.mark.parametrize("first", ["cpu", DEVICE])
def test_a_run_is_resumed_on_the_other_device(first, tmp_path):
    second = "cpu" if first == DEVICE else DEVICE
    job = tiny_job(optimizer=partial(torch.optim.AdamW, lr=0.01))
    settings = {"protocol": "bsp", "seed": 1, "checkpoint_every": "updates=4"}
    pl.train(job, cluster=pl.LocalCluster(2, device=first), stop="updates=6", out=tmp_path / "run", **settings)
    again = {"resume": tmp_path / "run", "stop": f"updates={UPDATES}"}
    result = pl.train(job, cluster=pl.LocalCluster(2, device=second), **again, **settings)
    assert distance(result, simulated(2, job)) < ROUNDING
