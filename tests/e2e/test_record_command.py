"""`paceline record` on scripts as users have them: what is recorded, and that nothing else changes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from machine_speed import scaled
from paceline.ddp_recording.layout import HOSTS
from paceline.ddp_recording.recording import DDPRecording
from paceline.ddp_recording.waiting import find_stragglers
from paths import SUPPORT, environment

pytestmark = pytest.mark.slow
SCRIPT = SUPPORT / "recording/recorded_script.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]


WITHOUT_DDP = """
import time, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    time.sleep(0.11 if dist.get_rank() == 1 else 0.01)
    optimizer.zero_grad()
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def command(folder, *words, **variables):
    return subprocess.run(
        [*map(str, words)],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(110),
    )


def train(folder, way, *record):
    return command(folder, *record, *TORCHRUN, "--nproc-per-node", 2, SCRIPT, way)


def record(folder, *options):
    return [sys.executable, "-m", "paceline", "record", "--out", folder / "rec", *options, "--"]


def check_straggler(recording, part, expected_s):
    """Check that rank 1 is named; on a busy machine a few steps are longer, and another rank may be slow in some."""
    straggler, *others = find_stragglers(recording)
    assert (straggler.rank, straggler.part, straggler.is_persistent) == (1, part, True)
    assert not any(each.is_persistent for each in others)
    assert straggler.excess_s > 0.8 * expected_s, "the other rank takes longer, too, on a busy machine"
    later_s = np.median(recording.work_s[1] - recording.work_s[0])
    assert 0.8 * expected_s < later_s < 1.5 * expected_s, "a sleep takes longer on a busy machine"


def sum_in(output):
    return next(line for line in output.splitlines() if line.startswith("sum"))


@pytest.mark.parametrize(
    "way",
    ["batch_norm", "no_sync", "reentrant", "static_graph", "views", "compiled", "compiled_outside", "own_collectives"],
)
def test_the_slow_rank_is_named_and_training_is_the_same(way, tmp_path):
    recorded = train(tmp_path, way, *record(tmp_path, "--sample", 5))
    assert recorded.returncode == 0, recorded.stderr
    assert "not fully recorded" not in recorded.stderr
    recording = DDPRecording(tmp_path / "rec")
    check_straggler(recording, "backward", 0.060 if way == "no_sync" else 0.030)
    assert len(recording.gradient_samples) == (7 if way == "reentrant" else 8)
    assert all(each.squared_norm < each.mean_square for each in recording.gradient_samples)
    assert sum_in(recorded.stdout) == sum_in(train(tmp_path, way).stdout)


@pytest.mark.parametrize("way", ["views", "scaled"])
def test_samples_are_those_of_the_unscaled_local_and_mean_gradient(way, tmp_path):
    for each, folder in ((way, tmp_path / "one"), ("plain", tmp_path / "other")):
        folder.mkdir()
        done = train(folder, each, *record(folder, "--sample", 5))
        assert done.returncode == 0, done.stderr
    one, other = (DDPRecording(tmp_path / name / "rec").gradient_samples for name in ("one", "other"))
    for ours, plain in zip(one, other, strict=True):
        assert ours == pytest.approx(plain, rel=1e-4)
        assert 0 < ours.squared_norm < ours.mean_square


def test_a_killed_run_is_read_up_to_its_last_rows(tmp_path):
    done = train(tmp_path, "killed", *record(tmp_path))
    assert done.returncode != 0
    advice = command(tmp_path, sys.executable, "-m", "paceline", "advise", tmp_path / "rec")
    assert advice.returncode in (0, 2)
    assert "steps" in advice.stdout + advice.stderr


def test_a_run_of_three_steps(tmp_path):
    done = train(tmp_path, "three_steps", *record(tmp_path))
    assert done.returncode == 0
    assert "has 1 step that all ranks recorded after the first 2, expected at least 10" in done.stderr


def test_a_script_without_ddp(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint('trained')\n")
    done = command(tmp_path, *record(tmp_path), *TORCHRUN, "--nproc-per-node", 2, script)
    assert done.returncode == 0
    assert "ranks 0 and 1 made no DistributedDataParallel model and no collectives" in done.stderr


def test_a_script_with_fsdp_or_own_collectives_is_recorded_by_the_flight_recorder(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_DDP)
    done = command(tmp_path, *record(tmp_path), *TORCHRUN, "--nproc-per-node", 2, script)
    assert done.returncode == 0, done.stderr
    recording = DDPRecording(tmp_path / "rec")
    assert recording.is_coarse
    check_straggler(recording, "unknown", 0.100)
    advice = command(tmp_path, sys.executable, "-m", "paceline", "advise", tmp_path / "rec")
    assert "They are coarser" in advice.stdout


def test_a_command_without_ranks(tmp_path):
    done = command(tmp_path, *record(tmp_path), sys.executable, "-c", "import torch; print('trained')")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "no rank has imported torch" in done.stderr
    assert "RANK is set" in done.stderr


def test_the_status_of_the_command_is_returned_and_noted(tmp_path):
    done = command(tmp_path, *record(tmp_path), sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 7
    [about] = (tmp_path / "rec").glob(HOSTS)
    assert json.loads(about.read_text())["exit_status"] == 7


def test_a_command_that_does_not_exist(tmp_path):
    done = command(tmp_path, *record(tmp_path), "torchrunn", "train.py")
    assert done.returncode == 2
    assert "there is no command 'torchrunn'" in done.stderr
    assert not (tmp_path / "rec").exists()


def test_a_folder_that_exists(tmp_path):
    (tmp_path / "rec").mkdir()
    (tmp_path / "rec" / "notes.txt").touch()
    done = command(tmp_path, *record(tmp_path), sys.executable, "-c", "print('started')")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path}/rec exists already; give another folder with --out" in done.stderr.replace("\n", " ")


def test_a_sitecustomize_of_the_user_still_runs(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own sitecustomize')\n")
    path = os.pathsep.join([str(tmp_path / "own"), environment()["PYTHONPATH"]])
    program = ["-c", "import sitecustomize; print(sitecustomize.__file__)"]
    done = command(tmp_path, *record(tmp_path), sys.executable, *program, PYTHONPATH=path, RANK="0")
    lines = done.stdout.splitlines()
    assert lines.count("own sitecustomize") == 2  # of both processes, the outer one perhaps at its end
    assert str(tmp_path / "own" / "sitecustomize.py") in lines
