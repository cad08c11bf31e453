"""The log is covered by the checkpoint, and a folder that disappears costs the run's end, not its state."""

import json
import shutil
from hashlib import sha256

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.checkpoint.store import STATE, SUMS, TENSORS
from paceline.core.records import UpdateMade
from paceline.errors import PacelineWarning
from paceline.recording.run_folder import CHECKPOINTS, EVENTS, MODEL, FolderGoneError
from selections import parametrize_few
from tiny_jobs import parameters_of, tiny_job

CLUSTER = pl.Cluster(3, timing=pl.timing.Exponential(1.0))


def train(path, resume=False, updates=8, **options):
    where = {"resume": path} if resume else {"out": path}
    usual = {"protocol": "bsp", "cluster": CLUSTER, "stop": f"updates={updates}", "checkpoint_every": "updates=2"}
    return pl.train(tiny_job(), **{**usual, **where, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole.folder, tmp_path / "run")


def saved_state(checkpoint):
    return json.loads((checkpoint / STATE).read_bytes())["state"]


def checkpoints(run):
    return sorted((run / CHECKPOINTS).glob("*-update-*"))


def test_the_digest_covers_the_log_up_to_the_checkpoint(whole):
    log = (whole.folder / EVENTS).read_bytes()
    for checkpoint in checkpoints(whole.folder):
        state = saved_state(checkpoint)
        assert state["log_digest"] == sha256(log[: state["log_bytes"]]).hexdigest()


def test_the_digest_of_a_resumed_run_covers_its_whole_log(whole, tmp_path):
    train(tmp_path / "run", updates=3)
    train(tmp_path / "run", updates=5, resume=True)
    train(tmp_path / "run", resume=True)
    assert (
        saved_state(checkpoints(tmp_path / "run")[-1])["log_digest"]
        == saved_state(checkpoints(whole.folder)[-1])["log_digest"]
    )


@pytest.mark.slow
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_detected_before_training_resumes(where, bit, whole, tmp_path_factory):
    run = shutil.copytree(whole.folder, tmp_path_factory.mktemp("copy") / "run")
    first = saved_state(checkpoints(run)[0])["log_bytes"]
    content = bytearray((run / EVENTS).read_bytes())
    content[int(where * first)] ^= 1 << bit
    (run / EVENTS).write_bytes(content)
    with pytest.raises(
        pl.RunError,
        match=r"the digest .* differs from that in the checkpoint.*; restore the file from a copy, or start a new run",
    ):
        train(run, resume=True, updates=12)
    assert (run / EVENTS).read_bytes() == content


def test_damage_after_an_earlier_checkpoint_falls_back_to_it(whole, copy):
    earlier, later = (saved_state(each)["log_bytes"] for each in checkpoints(copy)[-2:])
    content = bytearray((copy / EVENTS).read_bytes())
    content[(earlier + later) // 2] ^= 1
    (copy / EVENTS).write_bytes(content)
    with pytest.warns(PacelineWarning, match=r"resuming from 00000\d-update-6, before the damage"):
        again = train(copy, resume=True)
    assert torch.equal(parameters_of(again.model), parameters_of(whole.model))
    assert (copy / EVENTS).read_bytes() == (whole.folder / EVENTS).read_bytes()


def test_a_checkpoint_without_a_digest_is_accepted_with_one_warning(whole, copy):
    for checkpoint in checkpoints(copy):
        content = json.loads((checkpoint / STATE).read_bytes())
        del content["state"]["log_digest"]
        (checkpoint / STATE).write_text(json.dumps(content))
        files = {name: (checkpoint / name).read_bytes() for name in (STATE, TENSORS)}
        sums = "".join(f"{sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
        (checkpoint / SUMS).write_text(sums)
    with pytest.warns(PacelineWarning) as warned:
        again = train(copy, resume=True)
    assert len(warned) == 1
    assert "without a digest of events.jsonl" in str(warned[0].message)
    assert torch.equal(parameters_of(again.model), parameters_of(whole.model))


class At(pl.callbacks.Callback):
    """Does something to the folder when an update is made."""

    def __init__(self, update, do):
        self.update, self.do = update, do

    def on_record(self, record):
        if isinstance(record, UpdateMade) and record.version == self.update:
            self.do()


def gone(run, do, **options):
    with pytest.raises(FolderGoneError, match=r"was deleted, moved or unmounted during the run") as error:
        train(run, callbacks=[At(5, do)], **options)
    return error.value.kept


@parametrize_few("how", ["deleted", "moved", "replaced"], keep=1)
def test_a_deleted_folder_is_detected_and_the_state_is_saved_beside_it(how, whole, tmp_path):
    run = tmp_path / "run"

    def replaced():
        run.rename(tmp_path / "away")
        run.mkdir()
        (run / EVENTS).write_text("of another run")

    ways = {"deleted": lambda: shutil.rmtree(run), "moved": lambda: run.rename(tmp_path / "away"), "replaced": replaced}
    kept = gone(run, ways[how])
    assert kept == tmp_path / "run-rescued-1"
    assert (kept / MODEL).exists()
    again = train(kept, resume=True)
    assert torch.equal(parameters_of(again.model), parameters_of(whole.model))
    assert (kept / EVENTS).read_bytes() == (whole.folder / EVENTS).read_bytes()
    if how == "replaced":
        assert [path.name for path in run.iterdir()] == [EVENTS]


def test_without_a_writable_parent_the_state_is_saved_elsewhere(whole, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    kept = gone(tmp_path / "disk/run", lambda: shutil.rmtree(tmp_path / "disk"))
    assert kept.parent == tmp_path / "here"
    assert torch.equal(parameters_of(train(kept, resume=True).model), parameters_of(whole.model))


def test_without_a_working_directory_the_state_is_saved_in_the_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "disk")
    kept = gone("run", lambda: shutil.rmtree(tmp_path / "disk"))
    monkeypatch.chdir(tmp_path)
    assert kept == tmp_path / "tmp/run-rescued-1"


def test_a_timeline_that_cannot_be_written_does_not_lose_the_model(tmp_path):
    run = tmp_path / "run"
    callbacks = [pl.callbacks.PerfettoTrace(run / "timeline.json"), At(5, lambda: shutil.rmtree(run))]
    with (
        pytest.warns(PacelineWarning, match="the model is in .*run-rescued-1"),
        pytest.raises(pl.RunError, match=r"cannot write .*timeline\.json"),
    ):
        train(run, callbacks=callbacks, checkpoint_every="updates=100")
    assert (tmp_path / "run-rescued-1" / MODEL).exists()
