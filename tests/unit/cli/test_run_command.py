"""`paceline run` on the command line: what it starts, and what it refuses."""

import os
import sys

import pytest

from paceline.cli import main

ALONE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def paceline(tmp_path, monkeypatch):
    """Return a function that runs a command line in a folder with a script, and returns its exit status."""
    monkeypatch.chdir(tmp_path)
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.sh").write_text("""#!/bin/sh\nfor each in "$RANK" "$@"; do echo "<$each>"; done\n""")
    (tmp_path / "train.sh").chmod(0o755)
    (tmp_path / "file").touch()

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code

    return run


def test_words_after_the_script_are_its_own(paceline, capfd):
    assert paceline("run", "--no-python", "./train.sh", "--nnodes", "two words", "", "-m") == 0
    assert capfd.readouterr().out.splitlines() == ["<0>", "<--nnodes>", "<two words>", "<>", "<-m>"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py"], "there is no file 'train.py': give a script, as paceline run --nproc-per-node 4 train.py"),
        ([""], "there is no file ''"),
        (["/"], "there is no file '/'"),
        (["-m", "no_such.module"], "there is no module 'no_such.module': give a module, or omit --module"),
        (["-m", ".relative"], "there is no module '.relative'"),
        (["--no-python", "no-such"], "there is no program 'no-such': give a program, or omit --no-python"),
        (["-m", "--no-python", "os"], "--module and --no-python: a module is run by Python; give one of them"),
        (["--nnodes", "2", "file"], "--nnodes 2 without --rdzv-endpoint: give the address of the host of rank 0"),
        (["--rdzv-endpoint", "10.0.0.1", "file"], "--rdzv-endpoint '10.0.0.1': give the address of the host of rank 0"),
        (["--rdzv-endpoint", "[fd00::1]:0", "file"], "--rdzv-endpoint '[fd00::1]:0': give"),
        (["--rdzv-endpoint", ":29400", "file"], "as --rdzv-endpoint 10.0.0.1:29400"),
        (["--rdzv-endpoint", "192.0.2.1:29400", "file"], "the ranks cannot meet at 192.0.2.1:29400"),
        (["--node-rank", "1", "file"], "--node-rank 1, expected 0 to 0 with --nnodes 1"),
        (["--nproc-per-node", "0", "file"], "--nproc-per-node"),
        (["--nproc-per-node", "many", "file"], "Invalid value for '--nproc-per-node'"),
        (["--max-restarts", "-2", "file"], "--max-restarts"),
        (["--log-dir", "file", "file"], "--log-dir file is no folder: give another one"),
        (["--log-dir", "", "file"], "an argument is empty; is a variable of the shell not set?"),
        ([], "Missing argument"),
    ],
)
def test_a_wrong_command_line_is_refused(words, said, paceline, capsys):
    assert paceline("run", *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_under_another_launcher_it_is_the_rank_that_this_has_started(paceline, monkeypatch):
    executed = []
    monkeypatch.setattr(os, "execvp", lambda program, words: sys.exit(executed.append(words)))
    for name in ALONE:
        monkeypatch.setenv(name, "1")
    paceline("run", "file", "--nnodes")
    assert executed == [[sys.executable, "-u", "file", "--nnodes"]]


@pytest.mark.parametrize("option", ["--nproc-per-node", "--nnodes", "--node-rank", "--max-restarts"])
def test_under_another_launcher_ranks_are_not_started_again(option, paceline, monkeypatch, capsys):
    for name in ALONE:
        monkeypatch.setenv(name, "1")
    assert paceline("run", option, "1", "file") == 2
    said = f"{option}, but this process is rank 1 of another launcher: omit it, or unset RANK and WORLD_SIZE"
    assert said in " ".join(capsys.readouterr().err.split())
