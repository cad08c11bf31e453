"""TensorBoard reads back what the history holds."""

import logging

import numpy as np
import pytest

import paceline as pl
from paceline.core.records import UpdateMade, VersionEvaluated
from paceline.recording.callback import Memory, RunInfo
from paceline.recording.metrics.network_counters import NetworkCounters
from tiny_jobs import dataset, tiny_job

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

COLUMNS = {
    "train/loss": "loss",
    "train/learning_rate": "learning_rate",
    "update/k": "k",
    "update/staleness": "staleness",
    "workers/idle_share": "idle_share",
    "gradients/dropped": "dropped",
    "gradients/interrupted": "interrupted",
}


def run(*callbacks, stop="updates=30", **where):
    cluster = pl.Cluster(4, timing=pl.timing.Exponential(1.0))
    job = tiny_job(eval_data=dataset())
    plan = "k_sync(k=2)@updates=10 >> k_async(k=3)"
    return pl.train(job, protocol=plan, cluster=cluster, stop=stop, seed=3, callbacks=callbacks, **where).history


def scalars(folder):
    accumulator = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}


def assert_agree(read, history):
    columns = history.columns()
    assert columns["interrupted"][-1] > 0
    for tag, column in COLUMNS.items():
        assert [event.step for event in read[tag]] == list(columns["version"])
        assert [event.wall_time for event in read[tag]] == list(columns["time_s"])
        assert [event.value for event in read[tag]] == list(columns[column].astype(np.float32))
    evaluations = history.of(VersionEvaluated)
    assert len(evaluations) > 2
    for name in ("loss", "accuracy"):
        assert [(event.step, event.value) for event in read[f"eval/{name}"]] == [
            (each.version, np.float32(each.metrics[name])) for each in evaluations
        ]


def test_scalars_equal_the_history(tmp_path):
    assert_agree(scalars_after(tmp_path, run(pl.callbacks.TensorBoard(tmp_path))), run())


def scalars_after(folder, history):
    assert history.totals.updates == 30
    return scalars(folder)


@pytest.mark.slow
def test_a_new_run_replaces_the_scalars_of_an_earlier_one(tmp_path):
    run(pl.callbacks.TensorBoard(tmp_path), stop="updates=50")
    assert_agree(scalars_after(tmp_path, run(pl.callbacks.TensorBoard(tmp_path))), run())


@pytest.mark.slow
def test_a_resumed_run_hides_scalars_after_its_checkpoint(tmp_path):
    memory = Memory()
    history = run(memory)
    records = memory.records
    checkpoint = next(i for i, each in enumerate(records) if isinstance(each, UpdateMade) and each.version == 12) + 1
    about = RunInfo({}, history.totals, NetworkCounters())
    before = pl.callbacks.TensorBoard(tmp_path)
    before.on_start(about)
    for record in records[: checkpoint + 40]:  # the crash came later
        before.on_record(record)
    before._writer.close()
    after = pl.callbacks.TensorBoard(tmp_path)
    after.on_start(about)
    after.on_resume(records[:checkpoint])
    for record in records[checkpoint:]:
        after.on_record(record)
    assert_agree(scalars(tmp_path), history)


@pytest.mark.slow
def test_a_resumed_run_has_all_scalars_once(tmp_path):
    run(pl.callbacks.TensorBoard(tmp_path / "scalars"), stop="updates=13", out=tmp_path / "run")
    history = run(pl.callbacks.TensorBoard(tmp_path / "scalars"), resume=tmp_path / "run")
    assert_agree(scalars(tmp_path / "scalars"), history)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_logged_once_and_left_out(tmp_path, caplog):
    folder = tmp_path / "file/tensorboard"
    (tmp_path / "file").write_text("")
    callback = pl.callbacks.TensorBoard(folder)
    assert run(callback).totals.updates == 30
    [warning] = warnings_of(caplog)
    assert warning.startswith(f"TensorBoard in {folder} failed (NotADirectoryError: ")
    assert warning.endswith(": the run continues without it")
    (tmp_path / "file").unlink()
    assert_agree(scalars_after(folder, run(callback)), run())  # the next run tries again


@pytest.mark.slow
def test_a_resumed_run_goes_on_without_a_folder_that_cannot_be_written(tmp_path, caplog):
    run(stop="updates=13", out=tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert run(pl.callbacks.TensorBoard(tmp_path / "file"), resume=tmp_path / "run").totals.updates == 30
    assert len(warnings_of(caplog)) == 1


@pytest.mark.slow
def test_a_writer_that_fails_during_the_run_is_left_out(tmp_path, caplog):
    class Full(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == 5:
                callback._writer.add_scalar = fail

    def fail(*arguments, **named):
        raise OSError(28, "No space left on device")

    callback = pl.callbacks.TensorBoard(tmp_path)
    assert run(callback, Full()).totals.updates == 30
    assert len(warnings_of(caplog)) == 1
    assert [event.step for event in scalars(tmp_path)["train/loss"]][:5] == [1, 2, 3, 4, 5]


def test_without_tensorboard_the_error_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(pl.UsageError, match=r"pip install 'paceline\[tensorboard\]'"):
        pl.callbacks.TensorBoard(tmp_path)
