"""The programs of `examples/` run; the code of the pages is run by the `conftest.py` of the root."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from hosts import need_hosts
from machine_speed import scaled
from paths import ROOT
from shown_code import BLOCK, commands_of, run_command

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.docs


@pytest.mark.parametrize("name", [pytest.param("own_model.py", marks=pytest.mark.slow), "own_controller.py"])
def test_examples_run(name):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=scaled(100),
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert "reached the target" in done.stdout


def test_the_job_of_a_tutorial_trains_from_the_command_line(tmp_path):
    page = (ROOT / "docs/tutorials/own-model.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "sides.py").write_text("\n".join(code[:2]))
    [command] = re.findall(r"^paceline train sides:job .*$", page, re.MULTILINE)
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(100), check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "reached the target 0.2" in done.stdout


def test_the_readme_trains_with_auto_on_worker_processes(tmp_path, monkeypatch):
    page = (ROOT / "README.md").read_text()
    [block] = [each.groupdict() for each in BLOCK.finditer(page) if (each["mark"] or "").startswith("run by")]
    [(command, shown)] = commands_of(block)
    monkeypatch.chdir(tmp_path)
    choice = re.compile(r"^chosen +\S+ since \S+ s.*: .* of the given rate for k=\d: .*, phi \S+$")
    assert choice.match(shown.splitlines()[-1])
    assert choice.match(run_command(command).splitlines()[-1])


@pytest.mark.slow
def test_the_ddp_script_of_the_first_page_gains_by_shares(tmp_path, monkeypatch):
    page = (ROOT / "docs/getting-started.md").read_text()
    script, block = (each.groupdict() for each in BLOCK.finditer(page) if (each["mark"] or "").startswith("run by"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "train.py").write_text(script["source"])
    [(command, shown)] = commands_of(block)
    printed = " ".join(run_command(command).split())
    line = re.compile(r"100 updates in 0:\d\d; with equal shares 0:\d\d \(1\.\d\d x\); paceline report runs/train-1")
    assert line.search(" ".join(shown.split()))
    assert line.search(printed)
    assert " ".join(shown.split()[:20]) in printed  # what is taken over


@pytest.mark.slow
def test_the_script_of_a_tutorial_runs_and_loses_a_worker(tmp_path, monkeypatch):
    page = (ROOT / "docs/tutorials/many-machines.md").read_text()
    blocks = [each.groupdict() for each in BLOCK.finditer(page) if (each["mark"] or "").startswith("run by")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "train.py").write_text(blocks[0]["source"])
    for block in blocks[1:]:
        [(command, shown)] = commands_of(block)
        last = shown.splitlines()[-1]
        assert last in run_command(command)


def test_the_notebook_trains(tmp_path):
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=round(scaled(100)), resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert said.count("reached the target 0.3") == 3
    assert (tmp_path / "runs/notebook/model.safetensors").exists()


def test_the_demo_ends_with_its_table(tmp_path, capsys):
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    demo["main"](runs=tmp_path, loss=1.5)
    said = capsys.readouterr().out
    assert all(len(line) <= 80 for line in said.splitlines())
    assert re.search(r"won: loss 1.5 in .* x faster than", said.replace("\n", " "))
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"bsp", "k_sync-k-3", "asp"}
    assert (tmp_path / "report.html").exists()


def rows_of_two_sites(said):
    """Return the cells of the example's table by protocol."""
    assert all(len(line) <= 80 for line in said.splitlines())
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if "│" in line]
    return {name: cells for name, *cells in rows}


def megabytes(cells):
    return int(cells[-1].removesuffix(" MB"))


def test_the_two_simulated_sites_end_with_their_table(capsys):
    runpy.run_path(str(EXAMPLES / "two_sites.py"))["main"](["--seconds", "4"])
    rows = rows_of_two_sites(capsys.readouterr().out)
    assert list(rows) == ["bsp", "local_sgd", "k_sync(k=3) + local_steps"]
    # An update of BSP moves two versions and two gradients of 0.98 MB, a sum of the ring 1.5 gradients each way.
    assert megabytes(rows["bsp"]) > 5 * megabytes(rows["local_sgd"]) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_two_sites_of_real_processes_end_with_their_table():
    need_hosts()
    command = [sys.executable, EXAMPLES / "two_sites.py", "--real", "--seconds", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(250), check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    rows = rows_of_two_sites(done.stdout)
    assert megabytes(rows["bsp"]) > 2 * megabytes(rows["k_sync(k=3) + local_steps"]) > 0


def test_two_sites_of_real_processes_say_what_they_need(monkeypatch):
    main = runpy.run_path(str(EXAMPLES / "two_sites.py"))["main"]
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"--real needs Linux, root, and ip and tc \(iproute2\): no ip and tc"):
        main(["--real"])


def test_the_picture_can_be_drawn(tmp_path):
    picture = runpy.run_path(str(EXAMPLES / "picture.py"))
    picture["main"](tmp_path / "digits.svg", loss=1.5)
    assert "<svg" in (tmp_path / "digits.svg").read_text()
