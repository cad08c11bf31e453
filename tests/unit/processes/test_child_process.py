"""Start of child processes: the working directory, the folder of temporary files, and a daemon process."""

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Listener

import pytest

import paceline as pl
from paceline.processes import child_process
from paceline.processes.child_process import Launcher, fork


@pytest.fixture
def no_folder_yet(monkeypatch):
    """Let multiprocessing choose a folder for its sockets, as in a new process."""
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"authkey": b""})


def safe_path():
    return os.environ.get("PYTHONSAFEPATH")


@pytest.mark.parametrize("before", [None, "1"])
def test_a_python_that_starts_imports_nothing_of_the_working_directory(before, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if before:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    assert fork(safe_path, "a test") == "1"
    assert safe_path() == before


@pytest.mark.usefixtures("no_folder_yet")
def test_sockets_are_made_in_a_short_folder_if_that_of_temporary_files_is_long(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    fork(lambda: Listener(family="AF_UNIX").close(), "a test")
    assert tempfile.gettempdir() == str(folder)


@pytest.mark.usefixtures("no_folder_yet")
def test_without_a_short_folder_the_long_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    monkeypatch.setattr(child_process, "SHORT_FOLDERS", [str(tmp_path / "missing")])
    with pytest.raises(pl.UsageError, match=r"TMPDIR=.*longlong is too long .* give a folder of at most 71 bytes"):
        fork(lambda: None, "a test")


def test_a_daemon_process_cannot_start_workers(monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(pl.UsageError, match="worker processes cannot be started in a daemon process"):
        Launcher([])
