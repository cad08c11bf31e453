"""Attached loops whose models `fully_shard` has sharded: groups of ranks as workers, as processes."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import sharded_script
from launched_commands import outputs, run_on_ranks
from paths import environment
from ranks import free_port
from sharded_script import BATCH, GROUP, KINDS, STEPS, WORKERS, make_data, make_model, make_optimizer

RANKS = 4
EXACT = 1e-12
OF_FLOAT32 = 1e-4


def trained(protocol, kind, cwd):
    """Return the answers of the ranks in their order."""
    return answers_in(run_on_ranks(RANKS, sharded_script.__file__, protocol, kind, cwd=cwd))


def answers_in(printed):
    lines = [line.partition("ANSWER ")[2] for line in printed.splitlines() if "ANSWER " in line]
    answers = sorted((json.loads(line) for line in lines), key=lambda each: each["rank"])
    assert len(answers) == RANKS, printed
    return answers


def expected(answers, kind):
    """Return the parameters after steps by the mean gradient of all samples of each update."""
    model, accumulate = make_model(kind), 2 if kind == "accumulated" else 1
    optimizer = make_optimizer(model.parameters())
    inputs, targets, _ = make_data(BATCH * accumulate * RANKS * STEPS).tensors
    batches = list(zip(*(each["taken"] for each in answers), strict=True))
    for first in range(0, len(batches), accumulate):
        samples = [number for of_ranks in batches[first : first + accumulate] for each in of_ranks for number in each]
        assert len(set(samples)) == BATCH * accumulate * RANKS
        optimizer.zero_grad()
        mse_loss(model(inputs[samples]), targets[samples]).backward()
        if kind == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_are_those_of_the_mean_gradient_of_all_ranks(kind, tmp_path):
    answers = trained("bsp", kind, tmp_path)
    assert len({each["parameters"] for each in answers}) == 1, "all ranks have the same bits"
    ours = np.frombuffer(bytes.fromhex(answers[0]["parameters"]))
    assert abs(ours - expected(answers, kind)).max() < (OF_FLOAT32 if kind == "mixed" else EXACT)
    assert all(step == STEPS for each in answers for step in each["steps"]), "the optimizer has its state at the end"
    assert RANKS % GROUP == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_each_worker_has_a_launcher_of_its_own(is_killed, tmp_path):
    killed, port = tmp_path / "killed", free_port()
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", str(GROUP), sharded_script.__file__]
    launchers = [
        subprocess.Popen(
            [*command, "bsp", "plain", str(group), str(port), *([killed] if is_killed else [])],
            cwd=tmp_path,
            env=environment(PACELINE_TOKEN="a token of this test"),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for group in range(WORKERS)
    ]
    answers = answers_in("\n".join(outputs(launchers)))
    assert killed.exists() == is_killed
    assert (tmp_path / "killed.back").exists() == is_killed
    assert len({each["parameters"] for each in answers}) == 1, "all ranks have the same bits"
    if not is_killed:
        ours = np.frombuffer(bytes.fromhex(answers[0]["parameters"]))
        assert abs(ours - expected(answers, "plain")).max() < EXACT


BALANCED_BEFORE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline as pl

dist.init_process_group("gloo")
data = TensorDataset(torch.ones(160, 6))
first = DistributedDataParallel(nn.Linear(6, 4))
for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data)):
    first(x).sum().backward()

model = nn.Linear(6, 4)
fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = pl.attach(model, optimizer, DataLoader(data, 4), protocol="bsp")
steps = 0
for _ in run.epochs(1):
    for (x,) in run.loader:
        model(x).sum().backward()
        optimizer.step()
        steps += 1
print(f"{steps} steps of an attached loop", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_may_train_a_balanced_model_before_it_attaches_a_sharded_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BALANCED_BEFORE)
    printed = run_on_ranks(RANKS, script, cwd=tmp_path)
    assert printed.count("10 updates in ") == 1, printed
    assert printed.count("10 steps of an attached loop") == RANKS, printed
