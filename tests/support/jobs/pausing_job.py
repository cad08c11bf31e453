"""Job with 1.8 million parameters whose backward pass pauses when most gradients are known."""

import random
import time
from functools import partial

import torch
from torch import nn

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
        time.sleep(random.random() * LONGEST_S)  # keyed by worker and draw, as all random numbers
        return gradient


class Pausing(nn.Module):
    """Identity whose backward pass takes some time."""

    def forward(self, x):
        return Pause.apply(x)


def large_net():
    """Return a model of 1.8 million parameters; most of their gradients are known before the pause."""
    return nn.Sequential(
        *(nn.Linear(5, 300), nn.BatchNorm1d(300), nn.Tanh(), Pausing()),
        *(nn.Linear(300, 1600), nn.Tanh(), nn.Linear(1600, 800), nn.Tanh()),
        nn.Linear(800, 3),
    )


def large_job():
    optimizer = partial(torch.optim.SGD, lr=LR)
    return tiny_job(model=large_net, data=dataset(dtype=torch.float32), optimizer=optimizer)


def sgd_over(arrivals, job, n):
    """Return the parameters of plain SGD, one gradient after another."""
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
            ours.add_(change) if ours.is_floating_point() else ours.copy_(change)  # counts travel as they are
    named = [name for name, _ in replica.model.named_parameters()] + [name for name, _ in replica.model.named_buffers()]
    return dict(zip(named, [*state.parameters, *state.buffers], strict=True))
