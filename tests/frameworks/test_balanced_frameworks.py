"""Unchanged scripts of training frameworks under `paceline run`: the parameters and steps are those of torchrun."""

import json
import subprocess
import sys
from math import isfinite
from pathlib import Path

import pytest

from paths import environment

pytestmark = pytest.mark.integrations
SCRIPT = Path(__file__).with_name("balanced_script.py")
TORCHRUN = ["torch.distributed.run", "--standalone"]
ANSWER = "answer:"
SCRIPTS = [
    *("transformers", "transformers_accumulating", "transformers_language"),
    *("accelerate", "accelerate_accumulating"),  # which shards no model on CPUs
    *("lightning", "lightning_accumulating", "lightning_sharded"),
]


def answer(folder, script, *launcher, **variables):
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "--nproc-per-node", "2", str(SCRIPT), script, str(folder / "out")],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    # Under torchrun alone torch may abort a rank after its last line, "without an active exception".
    is_whole = not done.returncode or (launcher == tuple(TORCHRUN) and "Signal 6 (SIGABRT)" in done.stderr)
    assert is_whole, done.stdout[-3000:] + done.stderr[-6000:]
    (told,) = (line.partition(ANSWER)[2] for line in done.stdout.splitlines() if ANSWER in line)
    return json.loads(told)


@pytest.mark.parametrize("script", SCRIPTS)
def test_parameters_and_steps_are_those_of_torchrun(script, tmp_path):
    equal, shared = answer(tmp_path, script, *TORCHRUN), answer(tmp_path, script, "paceline", "run")
    assert shared.pop("parameters") == pytest.approx(equal.pop("parameters"), rel=1e-12, abs=1e-12)
    assert shared.pop("sizes") > equal.pop("sizes") + 1
    assert shared == equal


@pytest.mark.parametrize("script", ["transformers", "accelerate", "lightning"])
def test_a_run_ends_well_though_a_rank_is_lost(script, tmp_path):
    whole = answer(tmp_path, script, "paceline", "run")
    after_loss = answer(tmp_path, script, "paceline", "run", LOST="1:15")
    assert after_loss["steps"] == whole["steps"]
    assert all(map(isfinite, after_loss["parameters"]))
