"""The progress line: what it shows, where it is shown, and that it fits."""

import io
import os
import pty
import subprocess
import sys

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbclient import NotebookClient
from rich.console import Console

import paceline as pl
from machine_speed import scaled
from paceline.core.records import RunEnded, RunStarted, UpdateMade, VersionEvaluated, WorkerJoined, WorkerLost
from paceline.recording.callbacks.progress_line import ProgressLine, fitted
from paceline.recording.callbacks.progress_share import ProgressShare
from paths import environment
from tiny_jobs import tiny_job

SCRIPT = """
import paceline as pl
from tiny_tokens import token_job
pl.train(token_job(), protocol="dbw", cluster="4*exp(mean=1)", stop="nll<=1.9,updates=30",
         evaluate_every="updates=2"OPTION)
print("done")
"""


def update(version, loss=0.5, now_s=None, k=3):
    now_s = 1.0 * version if now_s is None else now_s
    return UpdateMade(
        now_s=now_s,
        version=version,
        k=k,
        workload=k * version,
        samples=8,
        loss=loss,
        learning_rate=0.1,
        staleness=0.0,
        max_staleness=0,
        reason="",
        busy_s=0.0,
        live_s=0.0,
    )


def line(width=200, stop="nll<=1.4,updates=100", **options):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    return ProgressLine("k_sync(k=3)", pl.Stop.parse(stop), console, **options), console.file


def told(width, records):
    """Return the last line that is drawn."""
    shown, file = line(width)
    with shown:
        shown._surface.interval_s = 0.0
        for record in records:
            shown.on_record(record)
        return file.getvalue().rpartition("\x1b[2K")[2].strip("\r\n")


RECORDS = [
    RunStarted(0.0, 4, ""),
    update(1, 2.0),
    VersionEvaluated(now_s=1.0, version=1, published_s=1.0, metrics={"loss": 2.5, "accuracy": 0.25, "nll": 2.4}),
    update(2, 1.0),
]


def test_loss_metrics_with_targets_quorum_and_live_workers_are_shown():
    expected = "2 updates  loss 1.9  nll 2.4 (target 1.4)  accuracy 0.25  eval loss 2.5  k 3, 4 workers"
    assert told(200, RECORDS) == f"k_sync(k=3)  2.0 s  {expected}"


def test_lost_workers_are_shown_and_counted():
    lost = [*RECORDS, WorkerLost(now_s=2.5, worker=1, reason="unplugged"), update(3)]
    assert told(200, lost).endswith("k 3, 3 of 4 workers")
    assert told(200, [*lost, WorkerJoined(now_s=3.5, worker=1), update(4)]).endswith("k 3, 4 workers")


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_narrow_line_keeps_the_most_important_parts(width):
    shown = told(width, RECORDS)
    assert len(shown) <= width
    assert "2 updates  loss 1.9" in shown
    if width == 80:
        assert shown == "k_sync(k=3)  2.0 s  2 updates  loss 1.9  nll 2.4  accuracy 0.25  k 3, 4 workers"


def test_the_last_line_has_the_reason_and_the_final_figures():
    end = RunEnded(now_s=9.0, outcome=pl.results.Outcome.UPDATES, reason="2 updates made", busy_s=1.0, live_s=1.0)
    assert told(200, [*RECORDS, end]).startswith("k_sync(k=3)  9.0 s  2 updates made  loss 1.9  nll 2.4 (target 1.4)")


@given(st.lists(st.tuples(st.integers(0, 5), st.text("abc ", min_size=1, max_size=9)), min_size=1), st.integers(1, 80))
def test_a_shortened_line_uses_the_full_width(fields, width):
    shown = fitted(fields, width)
    must = [text for rank, text in fields if rank == 0]
    assert len(shown) <= width or shown == "  ".join(must) or not must
    assert fitted(fields, None) == "  ".join(text for _, text in fields)


@pytest.mark.parametrize(
    ("stop", "workload", "share"),
    [
        ("updates=100", None, 0.25),
        ("gradients=150", 150, 0.5),
        ("seconds=100", None, 0.25),
        ("loss=0.25", None, 0.0),
        ("nll<=0.5", None, 0.5),
        ("nll<=0.5,updates=30", None, 25 / 30),
        ("gain>=3", None, 1 / 3),
    ],
)
def test_progress_is_that_of_the_nearest_stop_condition(stop, workload, share):
    progress = ProgressShare(pl.Stop.parse(stop), workload)
    progress.take_update(update(1, 1.0))
    for nll, gain in ((2.0, 0.0), (1.0, 1.0)):
        progress.take_metrics({"nll": nll, "gain": gain})
    assert progress.share(update(25)) == pytest.approx(share)


def test_progress_of_a_target_loss_is_logarithmic():
    progress = ProgressShare(pl.Stop(loss=0.25), None)
    for _ in range(200):
        progress.take_update(update(1, 0.5))
    first = ProgressShare(pl.Stop(loss=0.25), None)
    first.take_update(update(1, 1.0))
    for _ in range(200):
        first.take_update(update(1, 0.5))
    assert first.share(update(1)) == pytest.approx(0.5, abs=1e-6)


# --- where it is shown ------------------------------------------------------------------------------------


def script(option=""):
    return [sys.executable, "-c", SCRIPT.replace("OPTION", option)]


def on_a_terminal(command):
    """Return what a command writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, env={**environment(), "TERM": "xterm", "COLUMNS": "80"}, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 1 << 16):
            written += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode()


@pytest.mark.slow
def test_a_terminal_shows_the_line_by_default():
    shown = on_a_terminal(script())
    assert "dbw" in shown
    assert "reached the target 1.9" in shown
    assert on_a_terminal(script(", progress=False")).strip() == "done"


def test_without_a_terminal_the_line_is_shown_only_on_request(capsys, tmp_path):
    asked = {"protocol": "bsp", "cluster": pl.Cluster(2), "stop": "updates=3"}
    pl.train(tiny_job(), **asked)
    several = {"cluster": pl.Cluster(2), "stop": "updates=3", "protocols": "bsp", "seeds": 1, "processes": 1}
    pl.compare(tiny_job(), out=tmp_path / "silent", **several)
    assert capsys.readouterr() == ("", "")
    pl.train(tiny_job(), progress=True, **asked)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1].startswith("bsp  ")
    assert "3 updates made  loss 1." in said.err
    pl.compare(tiny_job(), out=tmp_path / "shown", progress=True, **several)
    assert "bsp, seed 0" in capsys.readouterr().err


@pytest.mark.slow
def test_in_a_notebook_one_output_is_updated():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SCRIPT.replace("OPTION", ""))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        NotebookClient(notebook, timeout=int(scaled(100))).execute()
    outputs = notebook.cells[0].outputs
    assert [output.output_type for output in outputs] == ["display_data", "stream"]
    assert "reached the target 1.9" in outputs[0].data["text/plain"]
    assert outputs[1].text == "done\n"
