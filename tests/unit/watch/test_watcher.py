import os
import time

import pytest

from paceline.recording.lock import FolderLock, is_locked
from paceline.recording.run_folder import EVENTS, RunFolder
from paceline.watch import watcher as module
from paceline.watch.watcher import State, Watcher
from written_runs import CONFIGURATION, ended, two_updates, update, write_run


def caught_up(watcher):
    while watcher.poll():
        pass
    return watcher


def aged(folder, seconds):
    """Make a log look as if its last record was written so long ago."""
    written_s = time.time() - seconds
    os.utime(folder / EVENTS, (written_s, written_s))


@pytest.fixture
def running(tmp_path):
    """Folder of a run of this process, and the writer of its log."""
    writer = RunFolder(tmp_path / "run", CONFIGURATION)
    for record in two_updates()[:-1]:
        writer.on_record(record)
    writer.settle()
    yield tmp_path / "run", writer
    if is_locked(tmp_path / "run"):
        writer.close()


def test_a_lock_is_seen_while_it_is_held(tmp_path):
    assert not is_locked(tmp_path)
    lock = FolderLock(tmp_path, "a run")
    assert is_locked(tmp_path)
    lock.release()
    assert not is_locked(tmp_path)


def test_a_run_without_a_folder_is_waited_for(tmp_path):
    watcher = caught_up(Watcher(tmp_path / "run"))
    assert watcher.state is State.WAITING
    write_run(tmp_path / "run", two_updates())
    assert caught_up(watcher).state is State.ENDED
    assert watcher.describe() == "ended: updates made"


def test_a_run_that_was_killed_before_its_first_record_has_stopped(running, monkeypatch):
    monkeypatch.setattr(module, "QUIET_S", 0.0)
    folder, writer = running
    (folder / EVENTS).unlink()
    watcher = caught_up(Watcher(folder))
    assert watcher.state is State.WAITING
    writer.close()
    watcher = caught_up(Watcher(folder))
    assert watcher.state is State.STOPPED
    assert watcher.describe().endswith("no process of this host writes to the folder; it has no record")


def test_a_run_that_writes_is_running(running):
    folder, writer = running
    watcher = caught_up(Watcher(folder))
    assert watcher.state is State.RUNNING
    writer.on_record(update(3, 5.0))
    writer.settle()
    caught_up(watcher)
    assert watcher.live.updates == 3
    assert watcher.state is State.RUNNING


@pytest.mark.parametrize(
    ("age_s", "state", "text"),
    [(10, State.RUNNING, "running, last record 10 s ago"), (40, State.SILENT, "no record for 40 s")],
)
def test_a_run_whose_process_lives_is_not_given_up(running, age_s, state, text):
    folder, _ = running
    aged(folder, age_s)
    watcher = caught_up(Watcher(folder))
    assert watcher.state is state
    assert watcher.describe() == text


def test_a_run_that_has_stopped_names_the_folder_of_its_standby(tmp_path):
    folder = tmp_path / "run"
    writer = RunFolder(folder, {**CONFIGURATION, "has_standby": True})
    writer.on_record(two_updates()[0])
    writer.close()
    aged(folder, 3)
    watcher = caught_up(Watcher(folder))
    assert watcher.describe().endswith(f"; its standby may go on in {tmp_path / 'run-standby'} of its host")


def test_a_run_whose_process_is_gone_has_stopped_until_it_is_resumed(running):
    folder, writer = running
    kept = writer.settle()
    writer.close()
    aged(folder, 3)
    watcher = caught_up(Watcher(folder))
    assert watcher.state is State.STOPPED
    assert watcher.describe().startswith("stopped without an end: no process of this host writes to the folder")
    assert "standby" not in watcher.describe()
    resumed = RunFolder(folder, CONFIGURATION, keep=kept)
    states = []
    for record in (update(3, 5.0), ended(5.0, 10.0)):
        resumed.on_record(record)
        resumed.settle()
        states.append(caught_up(watcher).state)
    resumed.close()
    assert states == [State.RUNNING, State.ENDED]


def test_records_of_a_log_that_is_read_late_are_old_in_every_chunk(running, monkeypatch):
    folder, _ = running
    monkeypatch.setattr("paceline.recording.log_tail.CHUNK_BYTES", 500)
    aged(folder, 40)
    watcher = Watcher(folder)
    assert watcher.poll()
    assert watcher.state is State.READING
    assert caught_up(watcher).age_s >= 40


def test_a_run_that_is_cut_back_begins_anew(running):
    folder, _ = running
    watcher = caught_up(Watcher(folder))
    first = watcher.live
    length = (folder / EVENTS).read_bytes().index(b"\n") + 1
    os.truncate(folder / EVENTS, length)
    caught_up(watcher)
    assert watcher.live is not first
    assert watcher.live.updates == 0


def test_the_lock_is_not_tested_while_records_arrive(running, monkeypatch):
    folder, _ = running
    monkeypatch.setattr(module, "is_locked", lambda folder: pytest.fail("a resumed run could be refused"))
    assert caught_up(Watcher(folder)).state is State.RUNNING
