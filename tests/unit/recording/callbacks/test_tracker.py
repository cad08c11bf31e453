"""Trackers: which scalars they get, and a failure that does not reach the run."""

import logging
import threading
from asyncio import CancelledError

import pytest

import paceline as pl
from paceline.core.records import VersionEvaluated
from paceline.recording.callbacks import tracker as tracker_module
from paceline.recording.callbacks.tracker import Tracker
from selections import parametrize_each_once
from tiny_jobs import dataset, tiny_job


class Kept(Tracker):
    """Tracker that keeps what it gets."""

    name = "Kept"
    package = extra = "json"

    def on_start(self, run):
        self.points, self.ends = [], []
        super().on_start(run)

    def begin(self, configuration):
        self.configuration = configuration

    def log(self, point):
        self.points.append(point)

    def finish(self, end):
        self.ends.append(end)


def run(*callbacks, stop="updates=10", **where):
    job = tiny_job(eval_data=dataset())
    cluster = pl.Cluster(4, timing=pl.timing.Exponential(1.0))
    return pl.train(job, protocol="k_sync(k=2)", cluster=cluster, stop=stop, callbacks=callbacks, **where).history


def test_within_an_interval_the_first_and_the_last_update_and_all_evaluations_are_sent(monkeypatch):
    monkeypatch.setattr(tracker_module, "UPDATE_INTERVAL_S", 3600.0)
    kept = Kept()
    history = run(kept)
    updates = [point for point in kept.points if "train/loss" in point.values]
    assert [point.version for point in updates] == [1, 10]
    first, last = history.of(pl.callbacks.UpdateMade)[0], history.of(pl.callbacks.UpdateMade)[-1]
    assert [point.values["train/loss"] for point in updates] == [first.loss, last.loss]
    assert updates[-1].time_s == last.now_s
    assert updates[-1].values["train/workload"] == 20
    evaluations = [(point.version, point.values["eval/loss"]) for point in kept.points if "eval/loss" in point.values]
    assert evaluations == [(each.version, each.metrics["loss"]) for each in history.of(VersionEvaluated)]
    assert len(evaluations) > 1
    assert kept.configuration["protocol"] == "k_sync(k=2)"
    assert [end.outcome for end in kept.ends] == ["updates"]


def test_updates_are_sent_after_each_interval(monkeypatch):
    monkeypatch.setattr(tracker_module, "UPDATE_INTERVAL_S", 0.0)
    kept = Kept()
    run(kept)
    assert [point.version for point in kept.points if "train/loss" in point.values] == list(range(1, 11))


def test_a_resumed_run_sends_what_is_new_with_all_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker_module, "UPDATE_INTERVAL_S", 0.0)
    run(stop="updates=6", out=tmp_path / "run")
    kept = Kept()
    history = run(kept, resume=tmp_path / "run")
    updates = [point for point in kept.points if "train/loss" in point.values]
    assert [point.version for point in updates] == [7, 8, 9, 10]
    assert updates[-1].values["gradients/interrupted"] == history.columns()["interrupted"][-1] > 0


@parametrize_each_once(method=["begin", "log", "finish"], kind=[ConnectionError, SystemExit, CancelledError])
def test_a_tracker_that_fails_is_logged_once_and_left_out(kind, method, caplog):
    kept = Kept()

    def fail(*arguments):
        raise kind("the network is gone")

    setattr(kept, method, fail)
    assert run(kept).totals.updates == 10
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"Kept failed ({kind.__name__}: the network is gone): the run continues without it"]


def test_a_tracker_that_hangs_delays_the_end_for_a_time_and_takes_bounded_memory(monkeypatch, caplog):
    monkeypatch.setattr(tracker_module, "UPDATE_INTERVAL_S", 0.0)
    monkeypatch.setattr(tracker_module, "MAX_WAITING", 3)
    monkeypatch.setattr(tracker_module, "CLOSE_TIMEOUT_S", 0.05)
    kept = Kept()
    released = threading.Event()
    kept.begin = lambda configuration: released.wait()
    run(kept)
    assert "Kept has not ended within 0.05 s: its last scalars may be missing" in caplog.text
    thread = next(each for each in threading.enumerate() if each.name == "paceline-json")
    released.set()
    thread.join()
    assert len(kept.points) == 3


def test_a_run_that_fails_ends_the_tracker_without_an_outcome():
    class Failing(pl.callbacks.Callback):
        def on_update(self, update):
            raise ZeroDivisionError

    kept = Kept()
    with pytest.raises(ZeroDivisionError):
        run(kept, Failing())
    assert kept.ends == [None]


@pytest.mark.parametrize(
    ("kind", "extra"),
    [(pl.callbacks.Wandb, "wandb"), (pl.callbacks.MLflow, "mlflow"), (pl.callbacks.Trackio, "trackio")],
)
def test_without_its_package_the_error_names_it(kind, extra, monkeypatch):
    monkeypatch.setattr(tracker_module, "find_spec", lambda name: None)
    with pytest.raises(pl.UsageError, match=rf"^{extra} is not installed; run: pip install 'paceline\[{extra}\]'"):
        kind("a project")
