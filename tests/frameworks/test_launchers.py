"""The image and the examples for launchers that are packages of their own, checked by the code of each package."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launched_commands import environment_with
from machine_speed import scaled
from paceline.core.records import RunResumed
from paceline.recording.run_folder import SavedRun
from paths import ROOT

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
EXAMPLES = ROOT / "examples"
SKYPILOT = ROOT / ".venv-skypilot/bin/python"
HADOLINT = Path(sys.executable).with_name("hadolint")
SUBMITTED = EXAMPLES / "submitit_train.py"
NODES = 4
LIMIT_S = scaled(200)
SBATCH = """#!/bin/bash
echo "Submitted batch job $$"
cp "$1" script.sh
export SLURM_JOB_ID=$$ SLURM_NTASKS=4 SLURM_JOB_NUM_NODES=4 SLURM_JOB_NODELIST=127.0.0.1
bash script.sh > /dev/null 2>&1 &
"""
SRUN = """#!/bin/bash
while [[ $1 != *python* ]]; do shift; done
for task in 0 1 2 3; do SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" >> "$PWD/log.$task" 2>&1 & done
wait
"""


def example(name):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


def test_the_trainjob_is_what_kubeflow_takes():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    job = example("trainjob.yaml")
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # which drops what it does not know


def test_the_task_is_what_skypilot_takes(tmp_path):
    if not SKYPILOT.exists():
        pytest.skip("skypilot is not installed")
    program = "import sys, sky; print(sky.Task.from_yaml(sys.argv[1]).num_nodes)"
    command = [SKYPILOT, "-c", program, EXAMPLES / "skypilot.yaml"]
    variables = {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout == "4\n", done.stderr


def test_the_dockerfile_has_no_fault():
    if not HADOLINT.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run([HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def submit(tmp_path):
    """Submit the example to programs that stand for those of Slurm, and return the results of its tasks."""
    for name, text in {"sbatch": SBATCH, "srun": SRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(stop):
        script = tmp_path / "submitit_train.py"
        script.write_text(re.sub(r'stop="\S+"', f'stop="{stop}"', SUBMITTED.read_text(encoding="utf-8")))
        command = [sys.executable, str(script), "digits"]
        variables = environment_with(tmp_path)
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return results(tmp_path, done.stdout.strip())

    return run


def results(folder, job_id):
    """Wait for the tasks of a job, and return what they return."""
    submitit = pytest.importorskip("submitit", reason="submitit is not installed")
    job = submitit.SlurmJob(folder=f"{folder}/digits-tasks", job_id=job_id, tasks=range(NODES))
    deadline_s = time.monotonic() + LIMIT_S
    while not all(job.task(rank).paths.result_pickle.exists() for rank in range(NODES)):
        assert time.monotonic() < deadline_s, "".join(log.read_text() for log in sorted(folder.glob("log.*")))
        time.sleep(0.2)
    return [job.task(rank).result() for rank in range(NODES)]


def test_the_script_for_submitit_trains_and_is_resumed(submit, tmp_path):
    pytest.importorskip("submitit", reason="submitit is not installed")
    assert submit("updates=20") == ["20 updates made"] * NODES
    assert submit("updates=30") == ["30 updates made"] * NODES
    assert len(SavedRun(tmp_path / "digits").history.of(RunResumed)) == 1
    script = (tmp_path / "script.sh").read_text()
    for option in ("--nodes=4", "--ntasks-per-node=1", "--signal=USR2@90"):
        assert f"#SBATCH {option}\n" in script
    assert "--no-kill --kill-on-bad-exit=0 --wait=0" in script
