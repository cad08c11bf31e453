"""Real ranks whose gradients leave during the backward pass: the same numbers, also where it is interrupted."""

import random
import time
from functools import partial

import pytest
import torch
from torch import nn

from faults.enough import EndWhen
from faults.ranks import run
from paceline.core.records import GradientArrived
from paceline.engines.distributed.transport.buckets import PIECE_BYTES
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.messages import GradientStarted, RemoteTaskCancelled
from paceline.worker.replica import Replica
from tiny_jobs import dataset, tiny_job

LONGEST_S = 0.06
LR = 0.1


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(random.random() * LONGEST_S)  # keyed by worker and draw, as everything random is
        return gradient


class Pausing(nn.Module):
    """Nothing, which takes some time on the way back."""

    def forward(self, x):
        return Pause.apply(x)


def large_net():
    """Return 1.8 million parameters, most of which are through when the backward pass takes its time."""
    return nn.Sequential(
        *(nn.Linear(5, 300), nn.BatchNorm1d(300), nn.Tanh(), Pausing()),
        *(nn.Linear(300, 1600), nn.Tanh(), nn.Linear(1600, 800), nn.Tanh()),
        nn.Linear(800, 3),
    )


def large_job():
    optimizer = partial(torch.optim.SGD, lr=LR)
    return tiny_job(model=large_net, data=dataset(dtype=torch.float32), optimizer=optimizer)


def sgd_over(arrivals, job, n):
    """Return the parameters of plain SGD with one gradient after another, each computed anew."""
    replica = Replica(job, 1, n)
    state, gradient = replica.layout.allocate(), replica.layout.allocate()
    for view, tensor in zip(
        [*state.parameters, *state.buffers], [*replica.model.parameters(), *replica.model.buffers()], strict=True
    ):
        view.copy_(tensor.detach())
    for arrival in arrivals:
        replica.gradient(arrival.worker, arrival.draw, None, state, gradient)
        for ours, change in zip(state.flat_parameters, gradient.flat_parameters, strict=True):
            ours.add_(change, alpha=-LR)
        for ours, change in zip(state.flat_buffers, gradient.flat_buffers, strict=True):
            ours.add_(change)
    named = [name for name, _ in replica.model.named_parameters()] + [name for name, _ in replica.model.named_buffers()]
    return dict(zip(named, [*state.parameters, *state.buffers], strict=True))


@pytest.fixture
def heard(monkeypatch):
    """Return what rank 0 hears, which is this process."""
    messages = []
    receive = Connection.receive

    def noted(self):
        messages.append(receive(self))
        return messages[-1]

    monkeypatch.setattr(Connection, "receive", noted)
    return messages


@pytest.mark.parametrize(("protocol", "n"), [("bsp", 1), ("k_sync(k=1)", 2)])
def test_every_gradient_is_that_of_its_minibatch(protocol, n, heard):
    def is_enough(seen):
        is_interrupted = any(isinstance(message, RemoteTaskCancelled) and message.gone for message in heard)
        return seen.updates >= 12 and (n == 1 or is_interrupted)

    job = large_job()
    [end, *_] = run(n + 1, job, protocol=protocol, stop="seconds=30", callbacks=[EndWhen(is_enough)])
    arrivals = [record for record in end.of(GradientArrived) if record.used]
    expected = sgd_over(arrivals, job, n)
    assert end.stopped_by == "interrupted"  # because it was enough
    assert sum(isinstance(message, GradientStarted) for message in heard) >= 12
    assert all(torch.equal(tensor, expected[name]) for name, tensor in end.parameters.items())


def test_a_short_gradient_goes_at_once(heard):
    run(2, tiny_job(), protocol="bsp", stop="updates=5")
    assert not any(isinstance(message, GradientStarted) for message in heard)
    assert Replica(tiny_job(), 1, 1).layout.nbytes < PIECE_BYTES
