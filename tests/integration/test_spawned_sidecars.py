"""Sidecars of a process whose command cannot be run again: child processes that get the pickled job.

The command of these tests is that of pytest, which starts no rank when it is run again.
"""

import threading
from dataclasses import replace

import pytest
import torch

import paceline as pl
from ranks import TOKEN, flat, free_port


@pytest.fixture
def alone(monkeypatch):
    """Let this process be the only rank of a launcher that sets the variables."""
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PACELINE_TOKEN": TOKEN,
        "PACELINE_SPAWN_SIDECARS": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.processes
def test_the_worker_and_the_evaluator_beside_rank_0_get_the_job(alone):
    settings = {"protocol": "bsp", "stop": "updates=5", "seed": 1}
    real = pl.train(pl.jobs.digits(), cluster=pl.Torchrun(start_timeout_s=60), **settings)
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
