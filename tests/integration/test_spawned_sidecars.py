"""Sidecars of a process whose command cannot be run again, as that of pytest: child processes with the pickled job."""

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import paceline as pl
from machine_speed import scaled
from ranks import TOKEN, flat, free_port


@pytest.fixture
def alone(monkeypatch):
    """Let this process be the only rank."""
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PACELINE_TOKEN": TOKEN,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.processes
def test_the_worker_and_the_evaluator_beside_rank_0_get_the_job(alone):
    settings = {"protocol": "bsp", "stop": "updates=5", "seed": 1}
    real = pl.train(pl.jobs.digits(), cluster=pl.Torchrun(start_timeout_s=scaled(60)), **settings)
    simulated = pl.train(pl.jobs.digits(), cluster=pl.Cluster(1), **settings)
    assert real.history.totals.updates == 5
    assert real.metrics == pytest.approx(simulated.metrics)
    torch.testing.assert_close(flat(real.model.state_dict()), flat(simulated.model.state_dict()), rtol=0, atol=1e-6)


def test_a_job_that_cannot_be_pickled_is_refused(alone):
    job = pl.jobs.digits()
    lock = threading.Lock()
    job = replace(job, loss=lambda output, target: lock and job.loss(output, target))
    refused = r"cannot be sent to the process beside this rank: loss: .*cannot pickle '_thread\.lock'"
    with pytest.raises(pl.UsageError, match=refused):
        pl.train(job, protocol="bsp", cluster=pl.Torchrun(), stop="updates=1")


SPAWNED_RANKS = """
import multiprocessing
import os
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import paceline as pl

PORT, TOKEN = sys.argv[1:]
DATA = TensorDataset(torch.ones(40, 2), torch.ones(40, 1))


def model():
    return torch.nn.Linear(2, 1)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def rank(number):
    variables = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": PORT, "PACELINE_TOKEN": TOKEN}
    os.environ.update({name: str(value) for name, value in variables.items()})
    job = pl.Job(model=model, loss=F.mse_loss, optimizer=optimizer, data=DATA, eval_data=DATA, batch_size=4)
    result = pl.train(job, protocol="bsp", cluster=pl.Torchrun(start_timeout_s=300), stop="updates=5", seed=1)
    if number == 0:
        print(result.reason, *result.metrics)


if __name__ == "__main__":
    spawning = multiprocessing.get_context("spawn")
    ranks = [spawning.Process(target=rank, args=[number]) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
"""


@pytest.mark.slow
def test_ranks_that_multiprocessing_has_spawned_have_an_evaluator(tmp_path):
    """The command of such a rank is that of multiprocessing, and its job is defined in the script."""
    (tmp_path / "train.py").write_text(SPAWNED_RANKS)
    command = [sys.executable, "train.py", str(free_port()), TOKEN]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert ended.stdout == "5 updates made loss\n", ended.stderr
