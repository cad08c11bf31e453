"""Nothing is ever written through a symbolic link into the place of a run's file."""

import json
import os
import shutil

import pytest

import paceline as pl
from paceline.cli.saved_options import COMMAND, SavedOptions
from paceline.recording.callbacks.tensorboard import TensorBoard
from paceline.recording.run_folder import CHECKPOINTS, EVENTS, MODEL, REPORT, RUN, TENSORBOARD, TIMELINE, WORKERS
from paceline.report import write_report
from paceline.utils.files import create_file, open_to_extend, replace_file, write_out
from selections import parametrize_each_once, parametrize_few
from tiny_jobs import tiny_job
from worker_threads import ThreadLauncher

PRECIOUS = "precious"
OPTIONS = {"protocol": "bsp", "cluster": pl.Cluster(2), "checkpoint_every": "updates=1"}


@pytest.fixture
def victim(tmp_path):
    """Return a file and a folder of the user, which nothing may change, after a check that nothing has."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/file").write_text(PRECIOUS)
    yield tmp_path / "home"
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["file"]
    assert (tmp_path / "home/file").read_text() == PRECIOUS


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    pl.train(tiny_job(), stop="updates=2", out=folder, **OPTIONS)
    return folder


@pytest.fixture
def run(saved, tmp_path):
    """Return the folder of a run."""
    return shutil.copytree(saved, tmp_path / "run")


def plant(link, target):
    if os.path.isdir(link):
        link.rename(link.with_name(f"{link.name}-before"))
    else:
        link.unlink(missing_ok=True)
    link.symlink_to(target)


FILES = [RUN, MODEL, COMMAND, TIMELINE, REPORT, f"{CHECKPOINTS}/latest", f"{CHECKPOINTS}/.unfinished"]


def write_everything(run, **where):
    callbacks = [SavedOptions(job="digits").saver(run), pl.callbacks.PerfettoTrace(run / TIMELINE)]
    try:
        pl.train(tiny_job(), stop="updates=4", callbacks=callbacks, **where, **OPTIONS)
        write_report([run])
    except pl.PacelineError as error:
        if "symbolic link" not in str(error):
            raise


@pytest.mark.parametrize("name", [*FILES, EVENTS])
@parametrize_few("again", ["resume", "overwrite"], keep=1)
def test_a_planted_link_to_a_file_is_replaced_or_refused(name, again, run, victim):
    content = (run / name).read_bytes() if (run / name).is_file() else b""
    (victim / "file").write_bytes(content)  # a link that is read is followed
    plant(run / name, victim / "file")
    write_everything(run, **({"resume": run} if again == "resume" else {"out": run, "overwrite": True}))
    assert (victim / "file").read_bytes() == content
    (victim / "file").write_text(PRECIOUS)


@pytest.mark.parametrize("name", [CHECKPOINTS, f"{CHECKPOINTS}/.unfinished", TENSORBOARD, TIMELINE, MODEL])
@parametrize_few("again", ["resume", "overwrite"], keep=1)
def test_a_planted_link_to_a_folder_is_replaced_or_refused(name, again, run, victim):
    plant(run / name, victim)
    write_everything(run, **({"resume": run} if again == "resume" else {"out": run, "overwrite": True}))


def test_scalars_are_not_written_through_a_link(run, victim, caplog):
    pytest.importorskip("tensorboard")
    plant(run / TENSORBOARD, victim)
    pl.train(tiny_job(), stop="updates=4", resume=run, callbacks=[TensorBoard(run / TENSORBOARD)], **OPTIONS)
    assert "it is a symbolic link, and paceline does not write through links" in caplog.text


def test_a_comparison_replaces_links(tmp_path, victim):
    options = {"protocols": "bsp, asp", "cluster": pl.Cluster(2), "stop": "updates=2", "seeds": 1, "processes": 1}
    pl.compare(tiny_job(), out=tmp_path / "all", **options)
    for name in ("table.txt", "table.json"):
        plant(tmp_path / "all" / name, victim / "file")
    pl.compare(tiny_job(), out=tmp_path / "all", **options)
    for name in ("table.txt", "table.json"):
        assert not (tmp_path / "all" / name).is_symlink()


@pytest.mark.slow
def test_figures_replace_links(run, tmp_path, victim, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("paceline.report.figures.AXES", {})  # a few figures are enough
    monkeypatch.setattr("paceline.report.figures.ONE_RUN", {})
    (tmp_path / "figures").mkdir()
    planted = tmp_path / "figures/samples.png"
    plant(planted, victim / "file")
    write_report([run], figures=tmp_path / "figures")
    assert planted.exists()
    assert not planted.is_symlink()


def test_a_trace_replaces_a_link(run, tmp_path, victim):
    plant(tmp_path / "trace.csv", victim / "file")
    pl.timing.Trace.of(pl.train(tiny_job(), stop="updates=2", **OPTIONS)).to_csv(tmp_path / "trace.csv")
    assert not (tmp_path / "trace.csv").is_symlink()


def test_a_device_named_by_the_user_is_written_and_never_replaced(tmp_path):
    write_out(tmp_path.__class__(os.devnull), b"text")
    (tmp_path / "link").symlink_to(os.devnull)
    write_out(tmp_path / "link", b"text")
    os.mkfifo(tmp_path / "pipe")
    for write in (lambda path: replace_file(path, b""), open_to_extend):
        with pytest.raises(OSError, match="it is a pipe, expected a regular file"):
            write(tmp_path / "pipe")
    assert not os.path.isfile(os.devnull)


def test_a_failed_write_leaves_no_temporary_file(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("before")
    with pytest.raises(OSError, match="folder"):
        replace_file(tmp_path / "folder", b"")
    replace_file(tmp_path / "file", b"after")
    with create_file(tmp_path / "new") as file:
        file.write(json.dumps(1).encode())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "new"]
    assert (tmp_path / "file").read_text() == "after"


@parametrize_each_once(name=[WORKERS, f"{WORKERS}/0"], again=["resume", "overwrite"])
def test_a_worker_saves_no_state_through_a_planted_link(name, again, tmp_path, victim, caplog, monkeypatch):
    monkeypatch.setattr("paceline.engines.local.workers.Launcher", ThreadLauncher)  # whose log is that of this process
    options = {"protocol": "bsp + local_steps(H=2)", "cluster": pl.LocalCluster(2), "checkpoint_every": "updates=1"}
    pl.train(tiny_job(), stop="updates=3", out=tmp_path / "run", **options)
    plant(tmp_path / "run" / name, victim_folder := tmp_path / "home")
    (victim_folder / "000001-gradient-1").mkdir()
    where = {"resume": tmp_path / "run"} if again == "resume" else {"out": tmp_path / "run", "overwrite": True}
    pl.train(tiny_job(), stop="updates=6", **where, **options)
    assert any("symbolic link" in record.getMessage() for record in caplog.records)
    (victim_folder / "000001-gradient-1").rmdir()  # is still there
