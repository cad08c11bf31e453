"""Errors name arguments in Python and options at the command line; the same error, said twice."""

import ast
import re
import sys
from pathlib import Path

import pytest

import paceline
import paceline as pl
from paceline.cli import main
from paceline.cli.flags import _OPTIONS
from tiny_jobs import tiny_job

SOURCE = Path(paceline.__file__).parent
FLAG = re.compile(rf"--({'|'.join(name.replace('_', '-') for name in _OPTIONS)})\b")
OPTIONS = {"protocol": "bsp", "cluster": "2*exp(mean=1)", "stop": "updates=2"}


def said_by_the_program(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit):
        main()
    return " ".join(capsys.readouterr().err.split())


def test_a_folder_that_exists_already(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    pl.train(tiny_job(), out="run", **OPTIONS)
    with pytest.raises(pl.UsageError, match=r"give another folder, or overwrite=True$"):
        pl.train(tiny_job(), out="run", **OPTIONS)
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
    said = said_by_the_program(monkeypatch, capsys, "train", "digits", *options, "--out", "run")
    assert said.endswith("give another folder, or --overwrite")


def test_a_folder_that_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pl.UsageError, match=r"expected the folder of a run, as given with out=$"):
        pl.replay("run")
    assert said_by_the_program(monkeypatch, capsys, "replay", "run").endswith("as given with --out")


def test_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(pl.UsageError, match=r"run is a file; expected the folder of a run"):
        pl.replay(tmp_path / "run")


def test_a_comparison_that_crashed_names_the_argument(tmp_path):
    def broken(output, target):
        raise ValueError("broken")

    with pytest.raises(pl.RunError, match=r"ask the same again with out='.*cmp' to run only these again"):
        pl.compare(
            tiny_job(loss=broken),
            protocols="bsp",
            cluster=pl.Cluster(2),
            stop="updates=2",
            seeds=1,
            out=tmp_path / "cmp",
            processes=1,
        )


def test_an_object_of_many_lines_is_refused_in_one():
    job = tiny_job()
    with pytest.raises(pl.UsageError) as refusal:
        tiny_job(optimizer=job.optimizer(job.model().parameters()))
    assert "\n" not in str(refusal.value)


def test_a_batch_size_is_not_advised_to_be_zero():
    with pytest.raises(pl.UsageError, match=r"batch_size=1.5, expected a whole number, as batch_size=32"):
        tiny_job(batch_size=1.5)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_the_command_line_speaks_of_its_options(path):
    if "cli" in path.relative_to(SOURCE).parts:
        return
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    found = [text for text in texts if isinstance(text, str) and FLAG.search(text)]
    assert [text for text in found if "trace:FILE" not in text] == []
