"""Experiment trackers, without a network: what they have stored is what the history holds."""

import json
import sqlite3
import struct

import pytest

import paceline as pl
from paceline.recording.callbacks import tracker
from paceline.recording.scalars import ScalarPoint
from tiny_jobs import dataset, tiny_job

pytestmark = pytest.mark.integrations
FULL, LAST = 1, 4  # kinds of frames


@pytest.fixture(autouse=True)
def _long_interval(monkeypatch):
    monkeypatch.setattr(tracker, "UPDATE_INTERVAL_S", 3600.0)


def run(*callbacks, stop="updates=30"):
    cluster = pl.Cluster(4, timing=pl.timing.Exponential(1.0))
    job = tiny_job(eval_data=dataset())
    return pl.train(job, protocol="k_sync(k=2)", cluster=cluster, stop=stop, seed=3, callbacks=callbacks).history


def evaluations(history):
    return {each.version: each.metrics["loss"] for each in history if type(each).__name__ == "VersionEvaluated"}


def records_of_log(content, header=7, block=1 << 15):
    """Yield the records of a file in the log format of LevelDB, with the header that wandb writes before them."""
    start, parts = header, b""
    while start + 7 <= len(content):
        if block - start % block < 7:  # the rest of a block is too short for a frame
            start += block - start % block
        _, length, kind = struct.unpack_from("<IHB", content, start)
        parts += content[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def test_wandb_offline(tmp_path):
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    history = run(pl.callbacks.Wandb("paceline", mode="offline", dir=str(tmp_path), name="a run"))
    wandb.teardown()  # waits for the process that writes
    [path] = tmp_path.rglob("*.wandb")
    rows, config, exit_code, names, steps = [], {}, None, (), []
    for content in records_of_log(path.read_bytes()):
        record = Record.FromString(content)
        match record.WhichOneof("record_type"):
            case "history":
                rows.append(
                    {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in record.history.item}
                )
            case "run":
                names = (record.run.project, record.run.display_name)
                config |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
            case "metric":
                steps.append((record.metric.glob_name, record.metric.step_metric))
            case "exit":
                exit_code = record.exit.exit_code
    assert {row["version"]: row["eval/loss"] for row in rows if "eval/loss" in row} == evaluations(history)
    assert [row["version"] for row in rows if "train/loss" in row] == [1, 30]
    assert names == ("paceline", "a run")
    assert (exit_code, config["protocol"]) == (0, "k_sync(k=2)")
    assert steps == [("*", "version")]


@pytest.mark.parametrize("is_given", [True, False])
def test_mlflow_with_a_store_of_its_own(is_given, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    uri = (tmp_path / "runs").as_uri()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    if not is_given:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    history = run(pl.callbacks.MLflow("paceline", tracking_uri=uri if is_given else None, run_name="a run"))
    client = mlflow.MlflowClient(uri)
    [stored] = client.search_runs([client.get_experiment_by_name("paceline").experiment_id])
    found = {each.step: each.value for each in client.get_metric_history(stored.info.run_id, "eval/loss")}
    assert found == evaluations(history)
    assert [each.step for each in client.get_metric_history(stored.info.run_id, "update/k")] == [1, 30]
    assert (stored.info.run_name, stored.info.status) == ("a run", "FINISHED")
    assert stored.data.params["protocol"] == "k_sync(k=2)"


def test_mlflow_takes_metrics_whose_names_it_refuses(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = tmp_path.as_uri()
    values = {"recall@5": 0.5, "loss (mean)": 1.0, "../x": 2.0, "f1, macro": 3.0}
    callback = pl.callbacks.MLflow("paceline", tracking_uri=uri)
    callback.begin({"protocol": "bsp"})
    callback.log(ScalarPoint(1, 0.0, {f"eval/{name}": value for name, value in values.items()}))
    client = mlflow.MlflowClient(uri)
    [stored] = client.search_runs([client.get_experiment_by_name("paceline").experiment_id])
    found = {name: value for name, value in stored.data.metrics.items() if name != "time_s"}
    assert found == {"eval/recall_5": 0.5, "eval/loss _mean_": 1.0, "eval/_/x": 2.0, "eval/f1_ macro": 3.0}


def test_a_server_of_mlflow_that_is_gone_does_not_stop_the_run(monkeypatch, caplog):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    history = run(pl.callbacks.MLflow("paceline", tracking_uri="http://127.0.0.1:1"))
    assert history.totals.updates == 30
    assert "MLflow failed (" in caplog.text
    assert "the run continues without it" in caplog.text


def test_trackio_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    history = run(pl.callbacks.Trackio("paceline", name="a run"))
    [path] = tmp_path.rglob("*.db")
    assert path.stem == "paceline"
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT step, metrics FROM metrics").fetchall()
    found = [(step, json.loads(text)) for step, text in rows]
    assert {step: values["eval/loss"] for step, values in found if "eval/loss" in values} == evaluations(history)
    assert [step for step, values in found if "train/loss" in values] == [1, 30]
