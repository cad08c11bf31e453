"""The file with the token of a job on one host: who can read it, and which run it belongs to."""

import fcntl
import os
import stat
import tempfile
import threading
from contextlib import contextmanager

import pytest

import paceline as pl
from machine_speed import scaled
from paceline.clusters.job_token import MIN_BITS, estimate_bits
from paceline.clusters.launch_env import LaunchEnv
from paceline.engines.distributed.rendezvous import token_file
from paceline.engines.distributed.rendezvous.token_file import create_token, read_token, remove_token, token_path


@pytest.fixture(autouse=True)
def runtime(monkeypatch, tmp_path):
    """Folder of this user for files of running programs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def ranks(**changes):
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return LaunchEnv.from_environment({**told, **changes})


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_the_other_ranks_read_the_token_of_rank_0():
    assert read_token(ranks(RANK="1")) is None
    token = create_token(ranks())
    assert estimate_bits(token) >= MIN_BITS
    assert read_token(ranks(RANK="1")) == read_token(ranks(PACELINE_SIDECAR="1")) == token


def test_every_token_is_another_one():
    assert len({create_token(ranks()) for _ in range(5)}) == 5


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_this_user_can_read_the_file_and_its_folder(umask):
    before = os.umask(umask)
    try:
        create_token(ranks())
    finally:
        os.umask(before)
    path = token_path(ranks())
    assert (mode(path.parent), mode(path)) == (0o700, 0o600)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_an_old_file_is_replaced_by_a_new_one_and_never_half_written():
    create_token(ranks())
    path = token_path(ranks())
    before, old = path.stat().st_ino, path.open()
    token = create_token(ranks())
    assert path.stat().st_ino != before
    assert len(old.read()) == len(token)
    assert old.close() or read_token(ranks()) == token


def test_an_old_file_with_other_rights_is_replaced_by_a_private_one():
    create_token(ranks())
    token_path(ranks()).chmod(0o644)
    create_token(ranks())
    assert mode(token_path(ranks())) == 0o600


def test_a_rank_that_has_read_an_old_token_reads_the_new_one_next():
    create_token(ranks())
    old = read_token(ranks(RANK="1"))
    token = create_token(ranks())
    assert old != token == read_token(ranks(RANK="1"))


@pytest.mark.parametrize(
    "other",
    [{"MASTER_PORT": "29501"}, {"TORCHELASTIC_RUN_ID": "b"}, {"TORCHELASTIC_RESTART_COUNT": "1"}],
    ids=lambda other: next(iter(other)),
)
def test_two_runs_of_one_user_have_different_tokens(other):
    one, another = create_token(ranks()), create_token(ranks(**other))
    assert (read_token(ranks()), read_token(ranks(**other))) == (one, another)
    assert one != another
    remove_token(ranks(), one)
    assert (read_token(ranks()), read_token(ranks(**other))) == (None, another)


@pytest.mark.parametrize("run_id", ["../../elsewhere", "x" * 5000, "a b\n", "ü/é"])
def test_any_run_id_names_a_file_in_the_folder(run_id, runtime):
    token = create_token(ranks(TORCHELASTIC_RUN_ID=run_id))
    assert [each.parent for each in runtime.rglob("*.token")] == [runtime / "paceline"]
    assert read_token(ranks(TORCHELASTIC_RUN_ID=run_id)) == token


def test_the_file_is_removed_at_the_end_unless_another_run_has_replaced_it():
    token = create_token(ranks())
    newer = create_token(ranks())
    remove_token(ranks(), token)
    assert read_token(ranks()) == newer
    remove_token(ranks(), newer)
    assert read_token(ranks()) is None
    remove_token(ranks(), newer)
    assert not token_path(ranks()).exists()


def test_a_run_that_ends_locks_the_folder_while_it_compares_and_removes(monkeypatch):
    token, read, locked = create_token(ranks()), token_file._read, []

    def compare(folder, path):
        with pytest.raises(BlockingIOError), opened(path.parent) as another:
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked.append(True)
        return read(folder, path)

    monkeypatch.setattr(token_file, "_read", compare)
    remove_token(ranks(), token)
    assert locked


def test_a_run_that_starts_waits_for_the_lock():
    create_token(ranks())
    starting = threading.Thread(target=create_token, args=(ranks(),), daemon=True)
    with opened(token_path(ranks()).parent) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)
        starting.start()
        starting.join(0.1)
        assert starting.is_alive()
    starting.join(scaled(10.0))
    assert not starting.is_alive()


@contextmanager
def opened(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


BOTH = pytest.mark.parametrize("use", [create_token, read_token, lambda ranks: remove_token(ranks, "")])


@BOTH
def test_a_folder_with_other_rights_is_refused(use, runtime):
    (runtime / "paceline").mkdir()
    (runtime / "paceline").chmod(0o750)
    with pytest.raises(
        pl.UsageError, match=r"has mode 750, expected 700: type chmod 700 .*/paceline, or set PACELINE_T"
    ):
        use(ranks())


@BOTH
def test_a_symbolic_link_in_place_of_the_folder_is_refused(use, runtime):
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "paceline").symlink_to(runtime / "elsewhere")
    with pytest.raises(pl.UsageError, match="is a symbolic link, expected a folder of this user: remove it, or set"):
        use(ranks())
    assert list((runtime / "elsewhere").iterdir()) == []


@BOTH
def test_a_file_in_place_of_the_folder_is_refused(use, runtime):
    (runtime / "paceline").write_text("")
    with pytest.raises(pl.UsageError, match="is no folder, expected a folder of this user: remove it"):
        use(ranks())


@BOTH
def test_a_folder_of_another_user_is_refused(use, runtime, monkeypatch):
    this_user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: this_user + 1)  # so that everything belongs to another user
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    folder = runtime / f"paceline-{this_user + 1}"
    folder.mkdir(mode=0o700)
    with pytest.raises(pl.UsageError, match=f"belongs to user {this_user}, expected user {this_user + 1}: set XDG_RUN"):
        use(ranks())
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_replaced_while_it_is_opened_is_refused(runtime, monkeypatch):
    create_token(ranks())
    folder, really_open = runtime / "paceline", os.open

    def replace_and_open(path, *given, **options):
        folder.rename(runtime / "before")
        folder.mkdir()
        folder.chmod(0o777)
        return really_open(path, *given, **options)

    monkeypatch.setattr(os, "open", replace_and_open)
    with pytest.raises(pl.UsageError, match="has mode 777, expected 700"):
        create_token(ranks())
    assert list(folder.iterdir()) == []


def test_a_file_that_others_can_read_or_write_is_not_used():
    create_token(ranks())
    token_path(ranks()).chmod(0o640)
    with pytest.raises(pl.UsageError, match=r"29500-\w+-0.token for the token of this job has mode 640, expected 600"):
        read_token(ranks())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_not_used():
    create_token(ranks())
    os.chown(token_path(ranks()), 65534, -1)
    with pytest.raises(pl.UsageError, match="belongs to user 65534, expected user 0"):
        read_token(ranks())


def test_a_link_or_a_pipe_in_place_of_the_file_is_not_read(runtime):
    create_token(ranks())
    path = token_path(ranks())
    path.rename(runtime / "secret")
    path.symlink_to(runtime / "secret")
    with pytest.raises(pl.UsageError, match="is a symbolic link, expected a file of this user"):
        read_token(ranks())
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(pl.UsageError, match="is no file, expected a file of this user"):
        read_token(ranks())


def test_a_link_in_place_of_the_file_is_replaced_and_its_target_is_not_written(runtime):
    create_token(ranks())
    path = token_path(ranks())
    path.unlink()
    (runtime / "target").write_text("before")
    path.symlink_to(runtime / "target")
    token = create_token(ranks())
    assert ((runtime / "target").read_text(), read_token(ranks())) == ("before", token)


def test_a_token_that_cannot_be_written_leaves_no_unfinished_file(monkeypatch):
    create_token(ranks())
    path = token_path(ranks())
    path.unlink()
    path.mkdir()
    with pytest.raises(pl.UsageError, match=r"cannot use .*/paceline for the token of this job \(Is a directory\)"):
        create_token(ranks())
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("given", [None, "", "relative/folder", "/nowhere/at/all"])
def test_without_a_folder_of_running_programs_that_for_temporary_files_is_used(given, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    if given is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relative/folder").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    token = create_token(ranks())
    assert token_path(ranks()).parent == tmp_path / f"paceline-{os.geteuid()}"
    assert read_token(ranks()) == token


def test_a_missing_folder_for_temporary_files_is_reported(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert read_token(ranks()) is None
    with pytest.raises(
        pl.UsageError, match=r"\(No such file or directory\): make its parent a writable folder, or set"
    ):
        create_token(ranks())
