"""Rank 0 is killed, torchrun starts the job again, and it goes on from its last checkpoint."""

from random import Random

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import paceline as pl
import restarted_script
from paceline.core.records import RunResumed, UpdateMade
from paceline.engines.distributed.rendezvous.rendezvous import is_restart
from paceline.engines.distributed.transport.gloo import dist
from paceline.recording.run_folder import MODEL, SavedRun
from restarted_script import EPOCHS, SAMPLES
from tiny_counting import counting_job, times_applied
from tiny_jobs import tiny_job
from torchrun import torchrun

_random = Random(7)
pytestmark = pytest.mark.timeout(300)
POINTS = _random.sample(range(1, 450), 10)  # of 450 records


def run(name, last, cwd):
    done = torchrun(cwd, "--nproc-per-node", 3, "--max-restarts", 1, restarted_script.__file__, name, last)
    assert done.returncode == 0, done.stderr
    saved = SavedRun(cwd / "run")
    [resumed] = saved.history.of(RunResumed)  # so it was killed
    return saved, resumed


def model_of(folder, job):
    model = job.model()
    model.load_state_dict(load_file(folder / MODEL))
    return model


def loss(model):
    inputs, target = tiny_job().data.tensors
    with torch.no_grad():
        return float(F.cross_entropy(model(inputs), target))


@pytest.fixture(scope="module")
def unbroken():
    """Return the losses of ten seeds of runs that are not killed."""
    runs = [restarted_script.train("loss", pl.Cluster(2), seed) for seed in range(10)]
    return torch.tensor([loss(result.model) for result in runs])


@pytest.mark.slow
@pytest.mark.parametrize("last", POINTS)
@pytest.mark.filterwarnings("ignore:.*ended in the middle of a line")
def test_rank_0_is_killed_and_the_run_ends_as_one_that_was_not(last, unbroken, tmp_path):
    saved, resumed = run("loss", last, tmp_path)
    updates = [record.version for record in saved.history.of(UpdateMade)]
    assert updates == list(range(1, 151))
    assert resumed.version in {1, *range(10, 151, 10)}
    reached = loss(model_of(tmp_path / "run", tiny_job()))
    assert abs(reached - unbroken.mean()) < 3 * unbroken.std()


@pytest.mark.slow
def test_rank_0_is_killed_and_every_sample_is_applied_exactly_once(tmp_path):
    run("counting", 200, tmp_path)
    assert times_applied(model_of(tmp_path / "run", counting_job(SAMPLES))) == [EPOCHS] * SAMPLES


def test_a_job_that_torchrun_starts_again_without_counting_is_recognised(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # that of torchrun's agent
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "PACELINE_TOKEN": "secret"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not is_restart(pl.Torchrun(), "/runs/one")
    assert not is_restart(pl.Torchrun(), "/runs/other")
    assert is_restart(pl.Torchrun(), "/runs/one")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_restart(pl.Torchrun(), "/runs/third")
