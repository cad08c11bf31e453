"""Training frameworks on attached ranks: the same as the plain DDP loop on the same minibatches, and what only they do.

Each test starts `framework_script.py` under torchrun, once for each framework.
"""

import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from paceline.core.records import DecisionMade
from paceline.errors import UsageError
from paceline.recording.run_folder import SavedRun
from paths import ROOT

pytestmark = pytest.mark.integrations
SCRIPT = Path(__file__).with_name("framework_script.py")
FRAMEWORKS = ["plain", "transformers", "accelerate", "lightning"]
WITH_SCALER = ["plain", "lightning"]  # the others refuse float16 without a GPU
ANSWER = "answer: "
RANKS, SAMPLES, EPOCHS = 2, 64, 3


def answers(framework, ranks=RANKS, **settings):
    """Return what each rank of a training prints at its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if not ranks:
        command = [sys.executable]
    run = subprocess.run(
        [*command, str(SCRIPT), framework, json.dumps(settings)], capture_output=True, text=True, timeout=110, cwd=ROOT
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    found = [json.loads(line.partition(ANSWER)[2]) for line in run.stdout.splitlines() if ANSWER in line]
    assert len(found) == max(1, ranks)
    return sorted(found, key=lambda answer: answer["rank"])


@pytest.fixture(scope="module")
def plain():
    """Return the parameters of the plain attached loop, by settings."""
    known = {}

    def parameters(**settings):
        key = json.dumps(settings)
        if key not in known:
            known[key] = answers("plain", **settings)[0]["parameters"]
        return known[key]

    return parameters


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"clip_norm": 0.5}, {"schedule": "step"}], ids=str)
def test_bsp_makes_the_updates_of_the_plain_loop(framework, settings, plain):
    for answer in answers(framework, **settings):
        assert answer["parameters"] == pytest.approx(plain(**settings), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_shares_by_speed_make_the_updates_of_the_plain_loop(framework, plain):
    ranks = answers(framework, protocol="balanced(m=4, leases=1)", slow_rank=1)
    for rank in ranks:
        assert rank["parameters"] == pytest.approx(plain(), rel=1e-12, abs=1e-12)
        assert rank["steps"] == EPOCHS * SAMPLES // 4 // RANKS
    assert len(ranks[0]["samples"]) > 1.2 * len(ranks[1]["samples"])
    assert sorted(number for rank in ranks for number in rank["samples"]) == sorted([*range(SAMPLES)] * EPOCHS)


@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_a_schedule_of_epochs_is_that_of_the_plain_loop(framework, plain):
    for answer in answers(framework, schedule="epoch"):
        assert answer["parameters"] == pytest.approx(plain(schedule="epoch"), rel=1e-12, abs=1e-12)


def test_the_plain_loop_makes_the_updates_of_ddp(plain):
    assert answers("ddp")[0]["parameters"] == pytest.approx(plain(), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_slow_rank_gets_fewer_batches_and_every_sample_is_used_once(framework, tmp_path):
    settings = {"protocol": "k_batch_async(k=2)", "slow_rank": 1, "schedule": "step", "out": str(tmp_path / "run")}
    ranks = answers(framework, **settings)
    assert ranks[0]["steps"] > ranks[1]["steps"] > 0
    assert sum(rank["steps"] for rank in ranks) == EPOCHS * SAMPLES // 4
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    assert sorted(number for rank in ranks for number in rank["samples"]) == sorted([*range(SAMPLES)] * EPOCHS)
    steps_of_a_rank = EPOCHS * SAMPLES // 4 // RANKS
    assert [rank["lr"] for rank in ranks] == pytest.approx([0.05 * 0.9**steps_of_a_rank] * RANKS)


@pytest.mark.parametrize(("framework", "mixed"), [*product(FRAMEWORKS, ["bf16"]), *product(WITH_SCALER, ["fp16"])])
def test_a_minibatch_that_overflows_is_left_out(framework, mixed, plain):
    expected = plain(mixed=mixed, overflow=20)
    assert all(map(math.isfinite, expected))
    assert expected != plain(mixed=mixed)
    for answer in answers(framework, mixed=mixed, overflow=20):
        assert answer["parameters"] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_protocol_that_interrupts_a_slow_rank_ends_with_equal_models(framework, tmp_path):
    ranks = answers(framework, protocol="k_sync(k=1)", slow_rank=1, out=str(tmp_path / "run"))
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    totals = SavedRun(tmp_path / "run").history.totals
    assert totals.interrupted > 0
    assert totals.samples_used == EPOCHS * SAMPLES


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_auto_chooses_protocol_and_rate(framework, tmp_path):
    ranks = answers(framework, protocol="auto", slow_rank=1, out=str(tmp_path / "run"))
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    saved = SavedRun(tmp_path / "run")
    left_out = EPOCHS * SAMPLES - saved.history.totals.samples_used
    assert left_out == 0 or framework == "transformers"  # its Trainer takes so many batches of an epoch on a rank
    assert left_out <= 8
    compared = [each for each in saved.history.of(DecisionMade) if each.kind in {"auto", "protocol"} and each.numbers]
    assert compared  # whether it then switches or stays
    assert all(each.numbers["phi"] > 0 for each in compared)
    assert saved.configuration["rules"]["noise"]["K"] == RANKS


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_loop_that_rank_0_leaves_ends_on_all_ranks(framework):
    ranks = answers(framework, stop_after=3)
    assert ranks[0]["steps"] == 3
    assert ranks[1]["steps"] in {3, 4}
    assert ranks[0]["parameters"] == ranks[1]["parameters"]


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
def test_a_loop_that_rank_0_leaves_ends_without_a_server_too(framework):
    ranks = answers(framework, protocol="all_reduce", stop_after=3)
    assert ranks[0]["steps"] == 3
    assert ranks[0]["parameters"] == ranks[1]["parameters"]


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_an_early_stop_on_rank_0_ends_the_run(framework, tmp_path):
    ranks = answers(framework, patience=1, evaluates=True, folder=str(tmp_path))
    assert [len(rank["evaluations"]) for rank in ranks] == [2, 0]
    assert ranks[0]["steps"] == 2 * SAMPLES // 4 // RANKS
    assert ranks[0]["parameters"] == ranks[1]["parameters"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_that_was_stopped_is_resumed_and_ends_as_one_that_was_not(framework, plain, tmp_path):
    answers(framework, stop_after=5, out=str(tmp_path / "run"))
    first, *others = answers(framework, resume=str(tmp_path / "run"))
    left = EPOCHS * SAMPLES // 4 // RANKS - 5
    assert first["steps"] == left
    for answer in [first, *others]:
        assert answer["parameters"] == pytest.approx(plain(), rel=1e-12, abs=1e-12)
        # Before the end another rank may have handed in a gradient of the next update, which the checkpoint has.
        assert answer["steps"] in {left - 1, left}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_process_trains_alone_and_clips(framework):
    [answer] = answers(framework, ranks=0, clip_norm=0.5, heartbeat_timeout_s=9)
    [again] = answers("plain", ranks=0, clip_norm=0.5)
    assert answer["steps"] == EPOCHS * SAMPLES // 4
    assert answer["parameters"] == pytest.approx(again["parameters"], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_only_rank_0_evaluates_and_saves(framework, tmp_path):
    ranks = answers(framework, evaluates=True, folder=str(tmp_path / "checkpoints"))
    assert [len(rank["evaluations"]) for rank in ranks] == [EPOCHS, 0]
    assert len(list((tmp_path / "checkpoints").glob("checkpoint-*"))) == EPOCHS


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_an_evaluation_may_take_longer_than_the_timeout_of_a_rank(framework, tmp_path):
    settings = {"evaluates": True, "evaluation_s": 0.2, "heartbeat_timeout_s": 1, "folder": str(tmp_path)}
    ranks = answers(framework, **settings)
    assert [len(rank["evaluations"]) for rank in ranks] == [EPOCHS, 0]
    assert sorted(number for rank in ranks for number in rank["samples"]) == sorted([*range(SAMPLES)] * EPOCHS)


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_the_example_trains_on_two_ranks(framework):
    script = ROOT / f"examples/frameworks/{framework}_attached.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    [loss] = [line for line in run.stdout.splitlines() if line.startswith("loss ")]
    assert float(loss.removeprefix("loss ")) < 0.5


def test_max_steps_is_refused():
    from paceline.integrations.transformers import PacelineArguments

    with pytest.raises(UsageError, match="give num_train_epochs"):
        PacelineArguments(output_dir="runs/never-written", max_steps=3)


@pytest.mark.parametrize("given", [True, "runs/a-checkpoint"])
def test_a_checkpoint_of_the_trainer_is_not_resumed(given):
    from paceline.integrations.transformers import PacelineArguments, PacelineTrainer

    arguments = PacelineArguments(output_dir="runs/never-written", use_cpu=True, report_to="none")
    trainer = PacelineTrainer(model=torch.nn.Linear(1, 1), args=arguments)
    with pytest.raises(UsageError, match="give run_folder, and resume_from_checkpoint=True"):
        trainer.train(resume_from_checkpoint=given)


def test_what_accelerate_cannot_know_is_refused():
    from paceline.integrations.accelerate import PacelineAccelerator

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = PacelineAccelerator(cpu=True, protocol="bsp", stop="epochs=1")
    with pytest.raises(UsageError, match=r"give PacelineAccelerator\(clip_norm=1\)"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UsageError, match=r"give prepare\(model, optimizer, loader\)"):
        accelerator.prepare(model, optimizer)
