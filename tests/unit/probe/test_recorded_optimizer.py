"""The optimizer of a recorded script: which one is recorded, and with which momentum."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, RMSprop

from paceline.ddp_recording import layout
from paceline.probe.gradient_sampler import GradientSampler
from paceline.probe.patches import StepProbe
from paceline.probe.rank_files import RankFiles

WITH_MOMENTUM = {"name": "SGD", "momentum": 0.9, "is_adaptive": False}
STEPS = 2


@pytest.fixture
def probe(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    probe = StepProbe(RankFiles(tmp_path, 0, sample_every=0), GradientSampler(0))
    probe.install()
    yield probe
    probe.remove()
    dist.destroy_process_group()


def train(optimizers, model):
    for _ in range(STEPS):
        model(torch.ones(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def recorded(folder):
    return json.loads(layout.header_file(folder, 0).read_text()).get("optimizer")


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (partial(SGD, lr=0.1, momentum=0.9), WITH_MOMENTUM),
        (partial(SGD, lr=0.1), {**WITH_MOMENTUM, "momentum": 0.0}),
        (partial(AdamW, lr=0.1, betas=(0.8, 0.99)), {"name": "AdamW", "momentum": 0.8, "is_adaptive": True}),
        (partial(RMSprop, lr=0.1, momentum=0.5), {"name": "RMSprop", "momentum": 0.5, "is_adaptive": False}),
        (partial(ZeroRedundancyOptimizer, optimizer_class=SGD, lr=0.1, momentum=0.9), WITH_MOMENTUM),
    ],
)
def test_the_optimizer_of_a_model_is_recorded(make, facts, probe, tmp_path):
    model = DistributedDataParallel(nn.Linear(4, 4))
    train([make(model.parameters())], model)
    assert recorded(tmp_path) == facts


def test_the_largest_momentum_of_the_groups_counts(probe, tmp_path):
    model = DistributedDataParallel(nn.Linear(4, 4))
    weight, bias = model.parameters()
    train([SGD([{"params": [bias]}, {"params": [weight], "momentum": 0.9}], lr=0.1)], model)
    assert recorded(tmp_path) == WITH_MOMENTUM


def test_an_optimizer_of_other_parameters_is_not_the_one_of_the_model(probe, tmp_path):
    other = nn.Linear(1, 1)
    train([Adam(other.parameters())], nn.Linear(4, 4))  # before there is a model
    assert recorded(tmp_path)["name"] == "Adam"
    model = DistributedDataParallel(nn.Linear(4, 4))
    train([Adam(other.parameters()), SGD(model.parameters(), lr=0.1, momentum=0.9)], model)
    assert recorded(tmp_path) == WITH_MOMENTUM


def test_a_momentum_that_no_reader_takes_is_left_out(probe, tmp_path):
    model = DistributedDataParallel(nn.Linear(4, 4))
    train([SGD(model.parameters(), lr=0.1, momentum=1.0)], model)
    assert recorded(tmp_path) is None
