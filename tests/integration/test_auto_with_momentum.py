"""`auto` with momentum, on two spirals with two slow workers: the loss may not jump."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.records import GradientArrived
from paceline.policies.estimators.noise.minibatch_losses import MinibatchLosses

WINDOW = 50  # minibatches of a smoothed loss
BATCH = 32


def spirals():
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(2000) % 2
    radius = torch.rand(2000, generator=generator).sqrt()
    angle = 2 * math.pi * radius + math.pi * label
    points = 3 * radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    data = TensorDataset(points + 0.1 * torch.randn(2000, 2, generator=generator), label)
    return pl.Job(
        model=lambda: nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
        data=data,
        batch_size=BATCH,
        name="spirals",
    )


def largest_smoothed_loss(protocol, seed):
    cluster = pl.Cluster(8, pl.timing.Gamma(16, 1.0), speed=[0.2] * 2 + [1.0] * 6)
    run = pl.train(spirals(), protocol=protocol, cluster=cluster, stop="gradients=400", seed=seed, progress=False)
    used = [each for each in run.history.of(GradientArrived) if each.used]
    minibatches = MinibatchLosses()  # of leases
    losses = [loss for each in used for loss in minibatches.add(each.loss, each.samples / BATCH)]
    return max(sum(losses[i : i + WINDOW]) / WINDOW for i in range(len(losses) - WINDOW))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 0, 3])
def test_the_loss_stays_near_that_of_bsp(seed):
    assert largest_smoothed_loss("auto", seed) <= 1.2 * largest_smoothed_loss("bsp", seed)
