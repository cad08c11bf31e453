"""Attached loops whose hosts are workers: the ranks of a host share each minibatch, and hand in one gradient."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import paceline as pl
from hosts_script import BATCH, EPOCHS
from loop_parts import SAMPLES, loss_of, make_plain_network, numbered_data, sgd
from machine_speed import scaled
from paceline.core.records import GradientArrived
from paceline.recording.run_folder import SavedRun
from paths import environment
from ranks import TOKEN, free_port

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "support/attached/hosts_script.py"
EXACT, LIMIT_S = 1e-12, scaled(100)
HOSTS, RANKS_EACH = 2, 2


def run(folder, **settings):
    """Return the answers of the ranks of two hosts, which are one here."""
    port, processes = str(free_port()), []
    for rank in range(HOSTS * RANKS_EACH):
        node, local_rank = divmod(rank, RANKS_EACH)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": HOSTS * RANKS_EACH,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": RANKS_EACH,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": HOSTS,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "PACELINE_TOKEN": TOKEN,
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, SCRIPT, json.dumps(settings)],
                cwd=folder,
                env=environment(**{name: str(value) for name, value in variables.items()}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    answers = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, stderr
        answers.append(json.loads(stdout.partition("ANSWER ")[2].splitlines()[0]))
    return answers


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bsp_of_two_hosts_is_bsp_of_two_workers(num_workers, tmp_path):
    answers = run(tmp_path, protocol="bsp", num_workers=num_workers)
    seen = Counter(number for answer in answers for batch in answer["seen"] for number in batch)
    assert seen == dict.fromkeys(range(SAMPLES), EPOCHS)
    model = make_plain_network()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 2, 0.5)
    data = numbered_data()
    for batches in zip(*(answer["seen"] for answer in answers), strict=True):
        x, y = data[[number for batch in batches for number in batch]]
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        scheduler.step()
    expected = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    for answer in answers:
        assert (torch.tensor(answer["parameters"], dtype=torch.float64) - expected).abs().max() < EXACT
        assert answer["rates"] == [group["lr"] for group in optimizer.param_groups]
        assert answer["length"] == SAMPLES // BATCH // HOSTS
    assert {each.worker for each in SavedRun(tmp_path / "run").history.of(GradientArrived)} == {0, 1}
    assert pl.replay(tmp_path / "run").is_same


def test_a_late_host_is_interrupted_as_a_whole(tmp_path):
    answers = run(tmp_path, protocol="k_sync(k=1)")
    assert len({tuple(answer["parameters"]) for answer in answers}) == 1
    used = [each for each in SavedRun(tmp_path / "run").history.of(GradientArrived) if each.used]
    assert sum(each.samples for each in used) == EPOCHS * SAMPLES
