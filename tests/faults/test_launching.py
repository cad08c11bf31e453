"""What the page on launching shows is run: the commands in namespaces that have its addresses."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from faults.hosts import hosts, need_hosts
from paceline.history import RunEnded, RunResumed, WorkerJoined, WorkerLost
from paceline.recording.run_folder import SavedRun

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/launching.md").read_text()
BIN = Path(sys.executable).parent
BLOCKS = {
    title: block for title, block in re.findall(r"^## ([^\n]+)\n+```sh\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
}
LIMIT_S = 100


def environment():
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def commands(title, *changes):
    """Return the commands of a block, each with what stands before all of them, and the host it is for."""
    for old, new in changes:
        assert old in BLOCKS[title]
    text = BLOCKS[title]
    for old, new in changes:
        text = text.replace(old, new)
    lines = text.splitlines()
    before = "\n".join(line for line in lines if "# on" not in line)
    found = [(line.partition("# on")[0], line.rpartition(".")[2]) for line in lines if "# on" in line]
    return [(f"{before}\n{'exec env ' if '=' in line.split()[0] else 'exec '}{line}", int(host) - 1) for line, host in found]


def start(made, command, host, cwd):
    in_namespace = ["ip", "netns", "exec", made.names[host], "bash", "-c", command]
    return subprocess.Popen(
        in_namespace, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def said(process):
    return process.communicate(timeout=LIMIT_S)[0]
