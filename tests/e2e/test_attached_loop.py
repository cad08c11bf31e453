"""Loops of users that are attached, under torchrun: equality with DDP, epochs, dropped gradients, ends."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

import paceline as pl
import restarted_loop
from paceline.recording.run_folder import SavedRun
from paths import ROOT
from torchrun import torchrun

SCRIPT = Path(__file__).parents[1] / "support/attached/attached_script.py"
SAMPLES = 96


def answers(folder, ranks, **settings):
    """Return what each rank has printed."""
    done = torchrun(folder, "--nproc-per-node", ranks, SCRIPT, json.dumps(settings))
    lines = [line.partition("ANSWER ")[2] for line in done.stdout.splitlines() if "ANSWER " in line]
    assert len(lines) == ranks, done.stderr
    return sorted((json.loads(line) for line in lines), key=lambda answer: answer["rank"])


def check_equal_to_ddp(found, epochs=3):
    assert all(answer["over"] for answer in found)
    assert {answer["stopped_by"] for answer in found} == {"epochs"}
    assert max(answer["difference"] for answer in found) < 1e-12, found
    assert Counter(number for answer in found for number in answer["samples"]) == dict.fromkeys(range(SAMPLES), epochs)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Lion"])
def test_bsp_is_ddp(optimizer, accumulate, tmp_path):
    check_equal_to_ddp(answers(tmp_path, 3, optimizer=optimizer, accumulate=accumulate, compare=True))


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [{"server": True}, {"shards": 2}, {"shards": 3, "share_memory": False}], ids=str)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_bsp_with_a_server_is_ddp(optimizer, cluster, tmp_path):
    found = answers(tmp_path, 3, optimizer=optimizer, cluster=cluster, compare=True)
    check_equal_to_ddp(found)
    assert [answer["states"] for answer in found] == [6, 0, 0]  # not of the parameter without a gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    "protocol", ["k_sync(k=2)", "k_batch_async(k=3)", "dbw", "asp", "k_sync(k=2) + local_steps(H=3)"]
)
def test_every_protocol_ends_on_all_ranks_and_its_decisions_are_those_of_the_replay(protocol, tmp_path):
    found = answers(tmp_path, 3, optimizer="SGD", attach={"protocol": protocol, "out": "run"})
    assert {answer["stopped_by"] for answer in found} == {"epochs"}
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_all_reduce_is_ddp(optimizer, accumulate, tmp_path):
    settings = {"accumulate": accumulate, "epochs": 8, "attach": {"protocol": "all_reduce"}}  # 32 updates
    check_equal_to_ddp(answers(tmp_path, 3, optimizer=optimizer, compare=True, **settings), epochs=8)


def last_losses(printed):
    """Return the losses after the last epoch; without a buffer, a line of one rank may end after that of another."""
    return [float(each) for each in re.findall(r"epoch 9: loss (\d\.\d{3})", printed)]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["all_reduce", "local_sgd(H=3)", "s3gd", "dc_s3gd"])
def test_every_protocol_without_a_server_ends_on_all_ranks_and_learns(protocol, tmp_path):
    text = (ROOT / "examples/plain_loop/attached.py").read_text()
    assert text.count("balanced(m=8)") == 1
    script = tmp_path / "script.py"
    script.write_text(text.replace("balanced(m=8)", f'{protocol}", out="run'))
    done = torchrun(tmp_path, "--nproc-per-node", 2, script)
    assert done.returncode == 0, done.stderr
    last = last_losses(done.stdout)
    assert max(last) < 0.4
    assert len(last) == 2
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["all_reduce", "bsp"])
def test_a_run_is_resumed_after_a_restart_by_torchrun(protocol, tmp_path):
    done = torchrun(tmp_path, "--max-restarts", 1, "--nproc-per-node", 2, restarted_loop.__file__, protocol)
    assert done.returncode == 0, done.stderr
    last = [int(each) for each in re.findall(r"rank \d: (\d+) steps, epochs", done.stdout)]
    assert len(last) == 2
    total = restarted_loop.EPOCHS * restarted_loop.BATCHES
    assert 0 < sum(last) <= total - 2 * restarted_loop.STEPS
    assert SavedRun(tmp_path / "run").history.totals.applied == total
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.slow
def test_the_example_learns_on_every_rank(tmp_path):
    done = torchrun(tmp_path, "--nproc-per-node", 3, ROOT / "examples/plain_loop/attached.py")
    assert done.returncode == 0, done.stderr
    last = last_losses(done.stdout)
    assert last
    assert max(last) < 0.4
