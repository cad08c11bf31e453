"""Small jobs that worker processes can import."""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from paceline.core.events import Accept, Apply
from paceline.jobs.job import Job
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model

SAMPLES = 96


def dataset(samples=SAMPLES, dtype=torch.float64):
    rng = np.random.default_rng(7)
    inputs = torch.tensor(rng.normal(size=(samples, 5)), dtype=dtype)
    target = torch.tensor(rng.integers(0, 3, size=samples))
    return TensorDataset(inputs, target)


def small_net(dtype=torch.float64):
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch_norm_net():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def sgd(lr=0.1, momentum=0.0):
    return partial(torch.optim.SGD, lr=lr, momentum=momentum)


def tiny_job(**changes):
    settings = {
        "model": small_net,
        "loss": F.cross_entropy,
        "optimizer": sgd(momentum=0.9),
        "data": dataset(),
        "batch_size": 8,
        "name": "tiny",
    }
    return Job(**{**settings, **changes})


def parameters_of(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def largest_relative_difference(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def plain_loop(job, seed, n, updates, skipped=()):
    """Train with a plain loop of synchronous SGD: the mean of n gradients, on the minibatches of n workers.

    Updates that are skipped make no step.
    """
    model = build_model(job, seed)
    optimizer = job.optimizer(model.parameters())
    loader = MinibatchLoader(job, seed, n)
    for draw in range(1, updates + 1):
        if draw in skipped:
            continue
        optimizer.zero_grad()
        for worker in range(n):
            inputs, target = loader.batch(worker, draw, None)
            (job.loss(model(inputs), target) / n).backward()
        optimizer.step()
    return model


def update_of(k, lr_scale=1.0, **more):
    """Return the command to make an update of k gradients of 8 samples."""
    return Apply(
        version=1,
        gradients=(Accept(worker=0, draw=1, staleness=0, samples=8),) * k,
        lr_scale=lr_scale,
        reason="",
        **more,
    )
