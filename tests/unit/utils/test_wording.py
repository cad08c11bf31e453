"""What a user reads at 80 columns: no word is broken, and one of a thing is singular."""

import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress

import pytest

import paceline as pl
from paceline.cli import main
from paceline.cli.theory_table import HEADINGS
from paceline.utils.wording import counted

BROKEN_HEADING = re.compile(r"\w-\n\w")
ONE_OF_MANY = re.compile(r"(?<![\d.,])1 (?!is|has|was|does)[a-z]+s\b")
PROTOCOLS = "bsp, k_batch_sync(k=2), k_batch_async(k=2), ssp(lead=2) + staleness_weight, ringmaster(r=12,stops=true)"
LONG_ERROR = "bsp@25% >> k_batch_async(k=123) >> ringmaster(r=12, stops=true) >> nonsense"


TERMINAL = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm", "NO_COLOR": "1"}


def everything_from(end):
    """Return what is written to a terminal until its other end is closed."""
    said = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(end, 1 << 16):
            said += part
    os.close(end)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode()).replace("\r", "")


def on_a_terminal(folder, *arguments):
    """Return what `paceline` writes to a terminal of 80 columns, and its exit status."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "paceline", *arguments]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **TERMINAL}, **streams)
    os.close(theirs)
    return everything_from(ours), process.wait()


def on_a_terminal_here(monkeypatch, *arguments):
    """Return the same of a command in this process, which has imported everything already."""
    ours, theirs = pty.openpty()
    for name, value in TERMINAL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with ThreadPoolExecutor(1) as reader:
        said = reader.submit(everything_from, ours)
        terminal = os.fdopen(theirs, "w")
        with terminal, redirect_stdout(terminal), redirect_stderr(terminal), pytest.raises(SystemExit) as end:
            main()
        return said.result(), end.value.code or 0


def test_a_table_breaks_no_word_and_uses_the_singular(monkeypatch):
    said, status = on_a_terminal_here(
        monkeypatch, "theory", "--protocols", PROTOCOLS, "--cluster", "2*exp(mean=1)", "--updates", "1"
    )
    assert status == 0, said
    assert all(len(line) <= 80 for line in said.splitlines())
    assert {"k_batch_async(k=2)", "stops=true)", "staleness", "gradients"} <= set(said.split())
    assert "simulated, 1 update, seed 0" in " ".join(said.split())
    assert not ONE_OF_MANY.search(said)


def test_an_error_breaks_no_word(monkeypatch):
    said, status = on_a_terminal_here(monkeypatch, "theory", "--protocols", LONG_ERROR, "--cluster", "2*exp(mean=1)")
    assert status == 2
    assert len(said.splitlines()) > 1
    assert all(len(line) <= 80 for line in said.splitlines())


@pytest.mark.slow
def test_a_run_with_counts_of_one_uses_the_singular(tmp_path):
    one = ["--cluster", "1*exp(mean=1)", "--stop", "updates=1"]
    texts = [
        on_a_terminal(tmp_path, "train", "digits", "--protocol", "bsp", *one, "--out", "run")[0],
        on_a_terminal(tmp_path, "replay", "run")[0],
        on_a_terminal(tmp_path, "trace", "run")[0],
        on_a_terminal(tmp_path, "compare", "digits", "--protocols", "bsp", *one, "--seeds", "1")[0],
    ]
    for said in texts:
        assert not ONE_OF_MANY.search(said), said
    assert "1 update made" in texts[0]
    assert texts[2].startswith("trace.csv: 1 round trip of 1 worker, 0 of them censored")


def test_no_heading_is_broken_inside_a_word():
    comparison = pl.compare  # imports what the tables need
    from paceline.experiments.comparison import _WORK

    assert callable(comparison)
    assert not BROKEN_HEADING.search("\n\n".join([*HEADINGS, *_WORK]))


@pytest.mark.parametrize("unit", ["updates", "gradients", "epochs", "seconds"])
def test_the_reason_of_a_run_uses_the_singular(unit):
    from tiny_jobs import tiny_job

    result = pl.train(tiny_job(), protocol="bsp", cluster="1*deterministic(value=1)", stop=pl.Stop(**{unit: 1}))
    assert counted(1, unit.removesuffix("s")) in result.reason
    assert not ONE_OF_MANY.search(result.reason)
