"""Steps measured by DDP's own timers, on a device for which the host does not wait; here it is the CPU."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.ddp_recording import layout
from paceline.probe import patches
from paceline.probe.gradient_sampler import GradientSampler
from paceline.probe.patches import StepProbe
from paceline.probe.rank_files import RankFiles

DATA_S, FORWARD_S, BACKWARD_S = 0.01, 0.02, 0.03


class LateBackward(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        time.sleep(BACKWARD_S)
        return gradient


class Late(nn.Linear):
    """Layer whose passes take a while."""

    def forward(self, x):
        time.sleep(FORWARD_S)
        return LateBackward.apply(super().forward(x))


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_each_tenth_step_is_a_row_with_the_durations_of_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(patches, "TIMED_BY_HOST", frozenset())
    files = RankFiles(tmp_path, 0, sample_every=0)
    probe = StepProbe(files, GradientSampler(0))
    probe.install()
    try:
        model = DistributedDataParallel(Late(4, 4))
        for _ in range(32):
            time.sleep(DATA_S)
            model(torch.ones(2, 4)).sum().backward()
    finally:
        probe.remove()
    files.flush()
    head, *rows = layout.steps_file(tmp_path, 0).read_text().splitlines()
    columns = dict(zip(head.split(","), np.array([row.split(",") for row in rows], dtype=float).T, strict=True))
    assert columns["step"].tolist() == [19, 29]
    parts = ("data_ns", "forward_ns", "backward_ns", "sync_ns")
    assert all(columns["forward_ns"] * 1e-9 > FORWARD_S)
    assert all((columns["backward_ns"] + columns["sync_ns"]) * 1e-9 > BACKWARD_S)
    assert all(sum(columns[part] for part in parts) * 1e-9 > DATA_S + FORWARD_S + BACKWARD_S)  # those of a mean step
