"""Trainings of `pl.Ray` with actors on this machine: parameters, actors that die, errors, Ctrl-C."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline as pl
from machine_speed import scaled
from paceline.core.records import GradientArrived, RunResumed, UpdateMade, WorkerJoined, WorkerLost
from paceline.recording.run_folder import SavedRun
from paths import ROOT

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
pytest.importorskip("ray", reason="ray is not installed")
SCRIPT = Path(__file__).with_name("ray_cluster_script.py")
LIMIT_S = scaled(240)
FIRST_GRADIENT_S = scaled(15.0)


def simulated(protocol, workers):
    """Return the parameters and the metrics of the simulated run."""
    settings = {"protocol": protocol, "stop": "updates=20", "seed": 1}
    result = pl.train(pl.jobs.digits(), cluster=pl.Cluster(workers), **settings)
    return torch.cat([tensor.flatten() for tensor in result.model.state_dict().values()]).tolist(), result.metrics


@pytest.mark.parametrize(("protocol", "workers"), [("bsp", 2), ("all_reduce", 3)])
def test_the_driver_gets_the_parameters_of_the_simulated_run(protocol, workers, answer):
    found = answer(protocol)
    parameters, metrics = simulated(protocol, workers)
    assert found["parameters"] == pytest.approx(parameters, rel=0, abs=1e-6)
    assert found["metrics"] == pytest.approx(dict(metrics), abs=1e-5)
    assert (found["reason"], found["updates"], found["folder"]) == ("20 updates made", 20, "None")


def test_a_job_of_the_driver_trains_and_is_evaluated_in_actors(answer, tmp_path):
    found = answer("own job")
    assert found["parameters"] == pytest.approx(found["expected"], rel=0, abs=1e-6)
    assert found["metrics"] == pytest.approx(found["expected metrics"], abs=1e-5)
    assert SavedRun(tmp_path / "run").configuration["main_module"] == "a notebook or an interactive session"


def test_an_actor_that_is_killed_is_made_again_under_its_rank(answer, tmp_path):
    found = answer("kill worker")
    assert (found["stopped_by"], found["folder"]) == ("interrupted", str(tmp_path / "run"))
    records = SavedRun(tmp_path / "run").history.records
    (lost,) = [record for record in records if isinstance(record, WorkerLost)]
    (joined,) = [record for record in records if isinstance(record, WorkerJoined) and record.now_s > 0]
    assert (lost.worker, joined.worker) == (1, 1)
    first = min(
        each.now_s
        for each in records
        if isinstance(each, GradientArrived) and each.worker == 1 and each.now_s > joined.now_s
    )
    assert first < lost.now_s + FIRST_GRADIENT_S
    assert not any(isinstance(record, RunResumed) for record in records)
    assert "rank 2 is made again" in (tmp_path / "printed").read_text()


def test_an_actor_whose_host_is_lost_is_made_again_on_another_one(answer, tmp_path):
    assert answer("lose host")["stopped_by"] == "interrupted"
    records = SavedRun(tmp_path / "run").history.records
    (lost,) = [record for record in records if isinstance(record, WorkerLost)]
    (joined,) = [record for record in records if isinstance(record, WorkerJoined) and record.now_s > 0]
    assert (lost.worker, joined.worker) == (1, 1)
    again = [each for each in records if isinstance(each, GradientArrived) and each.now_s > joined.now_s]
    assert {each.worker for each in again} == {0, 1}
    assert not any(isinstance(record, RunResumed) for record in records)


def test_when_the_actor_of_rank_0_is_killed_the_run_is_resumed(answer, tmp_path):
    found = answer("kill server")
    assert (found["reason"], found["updates"]) == ("200 updates made", 200)
    (resumed,) = [each for each in SavedRun(tmp_path / "run").history.records if isinstance(each, RunResumed)]
    assert resumed.version >= 10


def test_ctrl_c_saves_the_run_and_ends_the_actors(answer):
    found = answer("interrupt")
    assert found["stopped_by"] == "interrupted"
    assert (found["actors left"], found["states"]) == ([], ["DEAD"])
    assert 20 <= found["updates"] < 100_000
    assert found["resumed"]["updates"] == found["updates"] + 5


@pytest.mark.parametrize("protocol", ["bsp", "all_reduce"])
def test_a_run_grows_and_shrinks_with_the_hosts_of_ray_and_uses_every_sample_once_an_epoch(protocol, answer, tmp_path):
    found = answer(f"grow {protocol}")
    assert found["reason"].startswith("40 epochs")
    assert found["parameters"] == pytest.approx([-40.0] * len(found["parameters"]))
    assert (found["actors left"], found["states"]) == ([], ["DEAD"])
    records = SavedRun(tmp_path / "run").history.records
    assert sorted(each.worker for each in records if isinstance(each, WorkerJoined) and each.now_s > 0) == [2, 3]
    assert sorted(each.worker for each in records if isinstance(each, WorkerLost)) == [2, 2, 3, 3]  # first not there
    assert {update.k for update in records if isinstance(update, UpdateMade)} >= {2, 4}
    assert not any(isinstance(record, RunResumed) for record in records)
    assert "Ray has not made" not in (tmp_path / "printed").read_text()


def test_a_run_ends_with_the_first_workers_if_ray_has_no_resources_for_others(answer, tmp_path):
    found = answer("stay small")
    assert (found["reason"], found["updates"]) == ("20 updates made", 20)
    assert (found["actors left"], found["states"]) == ([], ["DEAD"])
    records = SavedRun(tmp_path / "run").history.records
    lost = [(each.worker, each.reason) for each in records if isinstance(each, WorkerLost)]
    assert lost == [(3, "it has not joined yet")]
    assert {update.k for update in records if isinstance(update, UpdateMade)} == {3}


def test_errors_reach_the_driver_with_their_cause(answer, tmp_path):
    found = answer("errors")
    kind, message, cause = found["code"]
    advice = f"correct the code, and train again with resume='{tmp_path / 'run'}'"
    assert (kind, message) == ("RunError", f"rank 2 failed: ValueError: no such class; {advice}")
    assert "worker 1" in cause
    assert "in failing_loss" in cause
    assert found["usage"][:2] == [
        "UsageError",
        f"{tmp_path / 'run'} exists already; give another folder, or overwrite=True",
    ]
    kind, message, _ = found["no restart"]
    assert kind == "RunError"
    assert message.startswith("rank 0 is gone: ")
    assert message.endswith("give pl.Ray a max_restarts above 0, and train again")
    assert found["pickle"][0] == "UsageError"
    assert "cannot be sent to the actors of Ray: loss: its variable LOCK is a lock" in found["pickle"][1]
    assert found["resources"][0] == "RunError"
    assert "Ray has not made rank" in found["resources"][1]


def test_the_command_line_trains_on_ray(tmp_path):
    half = "{CPU=0.5}"
    cluster = f"ray(workers=2, resources_per_worker={half}, server_resources={half})"
    options = ["--protocol", "bsp", "--cluster", cluster, "--stop", "updates=20", "--seed", "1", "--out", "run"]
    command = [sys.executable, "-m", "paceline", "train", "digits", *options, "--timeline", "--format", "json"]
    (tmp_path / "code").mkdir()
    as_job = {"runtime_env": {"working_dir": str(tmp_path / "code")}}  # as of ray job submit --working-dir
    settings = {"capture_output": True, "text": True, "timeout": LIMIT_S, "cwd": tmp_path, "check": False}
    ended = subprocess.run(command, env={**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(as_job)}, **settings)
    assert ended.returncode == 0, ended.stderr[-6000:]
    last = json.loads(ended.stdout.splitlines()[-1])
    assert last["updates"] == 20
    assert {"command.json", "events.jsonl", "timeline.json"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_the_example_trains(tmp_path):
    """The driver of the page, with as many CPUs as it has actors, whatever this machine has."""
    start = (
        "import ray, runpy; ray.init(num_cpus=3, include_dashboard=False); "
        f"runpy.run_path({str(ROOT / 'examples/ray/driver.py')!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", start, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False)
    assert "epochs" in ended.stdout, ended.stderr[-6000:]
    assert SavedRun(tmp_path / "digits").history.totals.updates > 0
