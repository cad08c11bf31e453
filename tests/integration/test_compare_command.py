"""`paceline compare`: its output, its exit status, and a script without a main guard."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from machine_speed import scaled
from paceline.cli import main
from paceline.experiments.runner.progress import ProgressBars
from paths import environment
from recording_display import RecordingDisplay

MODULE = """
from broken_parts import kill_this_process
from tiny_jobs import tiny_job

def job(broken=False):
    return tiny_job(loss=kill_this_process) if broken else tiny_job()
"""


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """Run `paceline compare` in a folder of its own; return its exit status, stdout and stderr."""
    (tmp_path / "compared_job.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = ["--protocols", "bsp, asp", "--cluster", "2*exp(mean=1)", "--stop", "updates=5", "--seeds", "2"]

    def run(job, *arguments):
        monkeypatch.setattr(sys, "argv", ["paceline", "compare", job, *options, "--processes", "1", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return run


@pytest.mark.slow
def test_the_command_compares_a_user_defined_job(program):
    status, out, err = program("compared_job:job", "--format", "json", "--price", "2.5", "--processes", "2")
    assert status == 0, err
    assert [row["protocol"] for row in json.loads(out)["rows"]] == ["bsp", "asp"]
    assert len(err.splitlines()) == 4  # one a run, since it is no terminal
    assert out == Path("runs/compare-tiny-1/table.json").read_text()


def test_the_command_prints_the_table_and_writes_to_the_out_folder(program):
    status, out, _ = program("compared_job:job", "--out", "here")
    assert (status, out) == (0, Path("here/table.txt").read_text())
    assert "All runs and this table are in here." in out
    assert {path.name for path in Path("here").iterdir()} == {"asp", "bsp", "compare.json", "table.json", "table.txt"}
    assert not Path("runs").exists()


@pytest.mark.slow
def test_without_a_folder_the_command_prints_where_it_wrote(program):
    _, out, _ = program("compared_job:job")
    assert "All runs and this table are in runs/compare-tiny-1." in out
    _, out, _ = program("compared_job:job", "--format", "json")
    assert json.loads(out)["folder"] == "runs/compare-tiny-2"


@pytest.mark.slow
def test_failed_runs_exit_with_status_1_after_the_table(program):
    status, out, err = program("compared_job:job(broken=true)", "--seeds", "1", "--processes", "2")
    assert status == 1
    assert out.count("killed by SIGKILL") == 2
    assert err.splitlines()[-1].startswith("paceline: 2 of 2 runs failed: bsp, seed 0: its process was killed by ")


def test_ctrl_c_exits_with_status_130_and_prints_how_to_resume(program, monkeypatch):
    display = RecordingDisplay(interrupts_at=1)  # once, though another run may end meanwhile
    monkeypatch.setattr(ProgressBars, "end", lambda self, *ending: display.end(*ending))
    status, _, err = program("compared_job:job", "--out", "here")
    assert status == 130
    assert "interrupted; to resume, run the same command with --out here" in err


SCRIPT = """
import paceline as pl
from tiny_jobs import tiny_job

pl.compare(tiny_job(), protocols="bsp, asp", cluster="2*exp(mean=1)", stop="updates=3", processes=2, out="out")
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_compares_once(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=scaled(100),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/table.txt").exists()
