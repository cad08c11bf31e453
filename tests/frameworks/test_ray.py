"""Trainings with Ray Train: the parameters of other launchers, and a worker that is replaced alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline as pl
from machine_speed import scaled
from paceline.core.records import GradientArrived, RunResumed, WorkerJoined, WorkerLost
from paceline.recording.run_folder import SavedRun
from paths import ROOT

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
pytest.importorskip("ray", reason="ray is not installed")
SCRIPT = Path(__file__).with_name("ray_script.py")
EXAMPLES = ROOT / "examples/ray"
LIMIT_S = scaled(240)
FIRST_GRADIENT_S = scaled(15.0)


def test_bsp_makes_the_parameters_of_the_simulated_run_and_evaluates(answer, tmp_path):
    simulated = pl.train(pl.jobs.digits(), protocol="bsp", cluster=pl.Cluster(2), stop="updates=20", seed=1)
    found = answer("train")
    expected = torch.cat([tensor.flatten() for tensor in simulated.model.state_dict().values()]).tolist()
    assert found["parameters"] == pytest.approx(expected, rel=0, abs=1e-6)
    assert found["metrics"] == pytest.approx(dict(simulated.metrics), abs=1e-5)
    assert len(found["token"]) > 30
    assert found["token"] not in (tmp_path / "printed").read_text()


def test_the_ranks_of_an_attached_loop_make_the_updates_of_one_run(answer):
    found = answer("attach")
    assert found["world_size"] == 3
    assert found["parameters"] == pytest.approx(plain_loop(), rel=0, abs=1e-6)


def plain_loop():
    """Return the parameters of gradient descent with the mean of three minibatches, as the attached loop makes it."""
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for inputs in x.split(24):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True)).backward()
            optimizer.step()
    return [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]


def test_a_worker_that_is_killed_is_replaced_alone(answer, tmp_path):
    assert answer("kill 2") == {"reason": "200 updates made"}
    records = SavedRun(tmp_path / "run").history.records
    (lost,) = [record for record in records if isinstance(record, WorkerLost)]
    (joined,) = [record for record in records if isinstance(record, WorkerJoined) and record.now_s > 0]
    assert (lost.worker, joined.worker) == (1, 1)
    first = next(each for each in records if isinstance(each, GradientArrived) and each.now_s > joined.now_s)
    again = next(
        each for each in records if isinstance(each, GradientArrived) and each.worker == 1 and each.now_s > joined.now_s
    )
    assert first.now_s <= again.now_s < lost.now_s + FIRST_GRADIENT_S
    assert not any(isinstance(record, RunResumed) for record in records)


def test_when_rank_0_is_killed_the_run_is_resumed(answer, tmp_path):
    assert answer("kill 0") == {"reason": "200 updates made"}
    (resumed,) = [each for each in SavedRun(tmp_path / "run").history.records if isinstance(each, RunResumed)]
    assert resumed.version >= 10


def test_the_example_trains(tmp_path):
    """The driver of the page, with as many CPUs as it has workers, whatever this machine has."""
    start = (
        "import functools, ray, runpy; ray.init = functools.partial(ray.init, num_cpus=4, include_dashboard=False); "
        f"runpy.run_path({str(EXAMPLES / 'train.py')!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", start, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False)
    assert "epochs" in ended.stdout, ended.stderr[-6000:]
    assert SavedRun(tmp_path / "digits").history.totals.updates > 0


def test_the_rayjob_has_a_pod_for_each_worker_of_the_example():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert f"num_workers={group['replicas']})" in (EXAMPLES / "train.py").read_text()
    mounts = {mount["mountPath"] for mount in group["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert job["spec"]["entrypoint"].split()[-1] in mounts
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for spec in (job["spec"]["rayClusterSpec"]["headGroupSpec"], group):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "digits"}, "spec": spec["template"]["spec"]}
        kubernetes_validate.validate(pod, "1.33", strict=True)
