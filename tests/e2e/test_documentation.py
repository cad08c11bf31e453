"""The programs, commands and examples that the documentation shows are run."""

import os
import re
import runpy
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from paceline.cli import main
from paths import ROOT

README = (ROOT / "README.md").read_text()
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.docs


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_the_programs_of_the_readme_run(code, capsys):
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_the_programs_of_the_pages_run(page):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, page.name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", blocks("sh"))
def test_the_commands_of_the_readme_run(block, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for command in block.splitlines():
        run(command, monkeypatch)


def run(command, monkeypatch):
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command.partition("#")[0])]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code


@pytest.mark.parametrize("name", [pytest.param("own_model.py", marks=pytest.mark.slow), "own_controller.py"])
def test_examples_run(name):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=100, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "reached the target" in done.stdout


def test_the_notebook_trains(tmp_path):
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
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


def test_the_picture_can_be_drawn(tmp_path):
    picture = runpy.run_path(str(EXAMPLES / "picture.py"))
    picture["main"](tmp_path / "digits.svg", loss=1.5)
    assert "<svg" in (tmp_path / "digits.svg").read_text()
