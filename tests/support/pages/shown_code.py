"""Execution of the code that the pages show: Python programs and shell commands, with the output shown below them."""

import doctest
import os
import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from unittest.mock import patch

import pytest
from sybil import Region

from paceline.cli import main
from paths import ROOT

MARK = r"(?:<!-- (?P<mark>slow|numbers vary|slow, numbers vary|not run: [^\n]*|run by [^\n]*) -->\n)?"
OUTPUT = r"(?:\n\n<!-- output -->\n```text\n(?P<output>.*?)^```)?"
BLOCK = re.compile(
    rf"^{MARK}```(?P<language>python|console|sh)\n(?P<source>.*?)^```(?P<after>{OUTPUT})", re.DOTALL | re.MULTILINE
)
COMMAND = re.compile(r"^\$ (?P<command>(?:.*\\\n)*.*)\n?(?P<output>(?:(?!\$ ).*\n?)*)", re.MULTILINE)
NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def shown_blocks(document):
    """Yield a region for each block of Python or shell of a page; an HTML comment above a block marks it."""
    for found in BLOCK.finditer(document.text):
        yield Region(found.start("language"), found.end(), found.groupdict(), evaluate)


def new_folder(namespace):
    """Create the folder of a page, in which its blocks run in order."""
    namespace["__name__"] = "__main__"
    namespace["__folder__"] = tempfile.TemporaryDirectory()


def remove_folder(namespace):
    namespace["__folder__"].cleanup()


def evaluate(example):
    """Run a block and compare what it prints with the output that the page shows."""
    block = example.parsed
    mark = block["mark"] or ""
    if re.match("not run|run by", mark):
        pytest.skip(mark)
    environment = {**os.environ, "COLUMNS": "80", "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    with chdir(example.namespace["__folder__"].name), patch.dict(os.environ, environment):
        if block["language"] == "python":
            printed = run_python(block["source"], example)
            check(example, block["output"], printed, varies="vary" in mark)
        else:
            for command, output in commands_of(block):
                check(example, output, run_command(command), varies="vary" in mark)


def commands_of(block):
    """Return the commands of a block, each with the output shown for it, if any."""
    if block["language"] == "sh":
        lines = re.sub(r"\\\n", " ", block["source"]).splitlines()
        return [(line, None) for line in lines if line and not line.startswith("#")]
    return [(found["command"], found["output"]) for found in COMMAND.finditer(block["source"])]


def run_python(source, example):
    code = compile("\n" * (example.line - 1) + source, example.path, "exec", dont_inherit=True)
    with redirect_stdout(StringIO()) as out:
        exec(code, example.namespace)
    return out.getvalue()


def run_command(command):
    """Run a shell command and return its output; `paceline` alone runs in this process, which has imported torch.

    Ranks write to the terminal itself, so `paceline run` is a process.
    """
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    if words[0] == "paceline" and words[1:2] != ["run"] and not {">", "|", "&&", "||", "&", ";"} & set(words):
        return run_paceline(words)
    done = subprocess.run(
        ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"{command} ended with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def run_paceline(words):
    with (
        patch.object(sys, "argv", words),
        redirect_stdout(StringIO()) as out,
        redirect_stderr(out),
        pytest.raises(SystemExit) as end,
    ):
        main()
    if end.value.code:
        pytest.fail(f"{' '.join(words)} ended with status {end.value.code}:\n{out.getvalue()}")
    return out.getvalue()


def check(example, shown, printed, *, varies):
    """Compare the output on a page with the printed one; where numbers vary, only the words."""
    if not shown:
        return
    shown = shown.replace("...\n", "...", 1) if shown.startswith("...\n") else shown  # it may stand for no line
    wanted, got = (NUMBER.sub("0", text) if varies else text for text in (shown, printed))
    if not doctest.OutputChecker().check_output(wanted, got, FLAGS):
        pytest.fail(f"{example.path}, line {example.line}: the page shows\n{shown}\nbut this is printed\n{printed}")


def checked_pages():
    """Return the README and the pages of the site."""
    return [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
