import json
import os
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from paceline.cli import main
from paceline.errors import UsageError
from paceline.recording.run_folder import SavedRun
from paceline.recording.schema import SCHEMA
from paceline.report import figures as drawings
from paceline.report.curves import groups
from paceline.report.write import check_same_job, read_runs, write_report
from written_runs import two_updates, write_run


@pytest.fixture
def parent(tmp_path):
    for protocol in ("bsp", "asp"):
        for seed in (0, 1):
            folder = tmp_path / "compared" / protocol / f"seed-{seed}"
            write_run(folder, two_updates(), protocol=protocol, seed=seed)
    return tmp_path / "compared"


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["paceline", "report", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_the_report_of_one_run_is_written_to_its_folder(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run", two_updates())
    assert not call(monkeypatch, tmp_path / "run")
    assert capsys.readouterr().out.strip() == str(tmp_path / "run/report.html")
    assert (tmp_path / "run/report.html").read_text().startswith("<!doctype html>")


def test_a_folder_whose_name_is_not_utf_8_has_a_report(tmp_path, monkeypatch, capsysbinary):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    write_run(folder, two_updates())
    assert not call(monkeypatch, folder)
    assert capsysbinary.readouterr().out.strip() == os.fsencode(folder / "report.html")
    assert "caf\ufffd" in (folder / "report.html").read_text()


def test_a_parent_folder_selects_all_its_runs(parent):
    assert [run.label for run in read_runs([parent])] == [
        "asp, seed 0",
        "asp, seed 1",
        "bsp, seed 0",
        "bsp, seed 1",
    ]
    assert write_report([parent]) == parent / "report.html"


def test_the_report_of_several_folders_is_written_here_or_to_out(parent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write_report([parent / "bsp", parent / "asp"]) == Path("report.html")
    wanted = tmp_path / "new" / "there.html"
    assert write_report([parent], out=wanted) == wanted
    assert wanted.exists()


def test_otherwise_equal_runs_are_named_by_their_folders(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / name, two_updates())
    labels = [run.label for run in read_runs([tmp_path])]
    assert labels == [f"bsp, seed 0 ({tmp_path / name})" for name in ("one", "two")]


@pytest.mark.parametrize(
    ("name", "words"), [("nowhere", "there is no folder"), ("empty", "is not the folder of a run")]
)
def test_a_folder_without_a_run_is_refused(tmp_path, name, words, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    assert call(monkeypatch, tmp_path / name) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"job": "another"}, "job = 'made up' and 'another'"),
        ({"batch_size": 16}, "batch_size = 8 and 16"),
        ({"parameters": 4}, "parameters = 3 and 4"),
    ],
)
def test_runs_of_different_jobs_are_refused_with_the_difference(tmp_path, change, said):
    write_run(tmp_path / "one", two_updates())
    write_run(tmp_path / "two", two_updates(), **change)
    with pytest.raises(UsageError, match=said):
        write_report([tmp_path])


def test_a_different_identity_is_refused(tmp_path):
    runs = [
        write_run(tmp_path / optimizer, two_updates(), identity={"optimizer": optimizer, "data": "a"})
        for optimizer in ("sgd", "adam")
    ]
    with pytest.raises(UsageError, match="identity optimizer = 'sgd' and 'adam'"):
        check_same_job(runs)


def test_protocol_and_cluster_may_differ(tmp_path):
    write_run(tmp_path / "one", two_updates())
    changes = {"protocol": "asp", "cluster": "another", "seed": 5, "workers": 3, "stop": "Stop(updates=9)"}
    write_run(tmp_path / "two", two_updates(), **changes)
    check_same_job([SavedRun(tmp_path / "one"), SavedRun(tmp_path / "two")])


def test_a_configuration_without_some_keys_is_read(tmp_path):
    write_run(tmp_path / "run", two_updates())
    (tmp_path / "run/run.json").write_text(json.dumps({"schema": SCHEMA, "job": "old"}))
    assert write_report([tmp_path / "run"]).exists()


@pytest.mark.slow
def test_every_figure_is_written_as_png_and_svg(parent, tmp_path):
    write_report([parent / "bsp" / "seed-0"], figures=tmp_path / "figures")
    names = {"progress-time", "progress-updates", "progress-workload", "worker-seconds", "activities", "samples"}
    names |= {"timeline", "first-updates", "round-trips", "compute-time", "staleness"}
    written = {path.name for path in (tmp_path / "figures").iterdir()}
    assert written == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}


@pytest.mark.slow
def test_figures_of_each_run_have_its_name(parent, tmp_path, monkeypatch):
    monkeypatch.setattr(drawings, "AXES", {})
    monkeypatch.setattr(drawings, "FORMATS", ("svg",))
    monkeypatch.setattr(drawings, "ONE_RUN", {"timeline": drawings.draw_timeline})
    write_report([parent / "bsp"], figures=tmp_path / "figures")
    written = {path.name: path.read_text() for path in (tmp_path / "figures").iterdir()}
    assert set(written) == {
        "worker-seconds.svg",
        "activities.svg",
        "samples.svg",
        "timeline-1-bsp-seed-0.svg",
        "timeline-2-bsp-seed-1.svg",
    }
    assert all("<svg" in text for text in written.values())


def test_figures_that_cannot_be_written_are_an_error(parent, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    assert call(monkeypatch, parent, "--figures", tmp_path / "file") == 1
    assert "cannot write figures" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_an_error(parent, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    assert call(monkeypatch, parent, "--out", tmp_path / "file" / "report.html") == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.slow
def test_figures_of_a_run_without_updates_and_with_names_that_look_like_formulas_are_drawn(tmp_path):
    write_run(tmp_path / "one", two_updates(), protocol="$\\frac{_")
    write_run(tmp_path / "two", two_updates()[:1], protocol="_hidden")
    runs = read_runs([tmp_path])
    for run in runs:
        for draw in drawings.ONE_RUN.values():
            draw(Figure(layout="constrained"), run)
    figure = Figure(layout="constrained")
    drawings.draw_progress(figure, groups(runs), "time")
    figure.savefig(tmp_path / "progress.svg")


def test_without_matplotlib_the_error_names_the_package(parent, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[figures\]'"):
        write_report([parent], figures=tmp_path / "figures")
    assert not (parent / "report.html").exists()
