"""Commands of launchers, as processes of this machine: their environment, their end, and what their run has logged."""

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil

from machine_speed import scaled
from paceline.errors import PacelineWarning
from paceline.recording.run_folder import SavedRun
from paths import environment
from ranks import free_port

LIMIT_S = scaled(120)


def environment_with(*folders, **variables):
    """Return the variables of this process, with these folders and the repository's programs on the path."""
    path = os.pathsep.join([*map(str, folders), str(Path(sys.executable).parent), os.environ["PATH"]])
    return environment(PATH=path, **variables)


def run_on_ranks(ranks, script, *arguments, cwd, options=(), **variables):
    """Run a script under `paceline run`, which succeeds, and return what it has printed."""
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", str(ranks), *options]
    done = subprocess.run(
        [*command, script, *map(str, arguments)],
        cwd=cwd,
        env=environment(**variables),
        text=True,
        timeout=LIMIT_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def start_on_hosts(hosts, ranks, script, *arguments, cwd, **variables):
    """Return the launchers of several hosts of this machine, with so many ranks each."""
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", str(ranks), "--nnodes", str(hosts)]
    where = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    return [
        subprocess.Popen(
            [*command, *where, "--node-rank", str(host), script, *map(str, arguments)],
            cwd=cwd,
            env=environment(**variables),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for host in range(hosts)
    ]


def kill(process):
    """End a process and all that it has started, as the loss of their host does."""
    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
    process.wait()
    process.stdout.close()


def outputs(processes):
    """Wait for processes, which succeed, and return what they have printed."""
    told, deadline_s = [], time.monotonic() + LIMIT_S
    for process in processes:
        try:
            told.append(process.communicate(timeout=max(0, deadline_s - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            kill(process)
            told.append("it does not end")
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(told)
    return told


def statuses(processes):
    """Wait for processes, and return their exit statuses."""
    for process in processes:
        process.communicate(timeout=LIMIT_S)
    return [process.returncode for process in processes]


def children(process):
    """Return the processes that a process and its children have started."""
    return [child.pid for child in psutil.Process(process).children(recursive=True)]


def environment_of(process):
    """Return the environment of a process."""
    return psutil.Process(process).environ()


def await_records(folder, kind, count):
    """Wait until a run has logged so many records of a kind."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* is cut short", PacelineWarning)  # the run is writing that line
            if (folder / "run.json").exists() and len(SavedRun(folder).history.of(kind)) >= count:
                return
        time.sleep(0.2)
    raise TimeoutError(f"{folder} has fewer than {count} records {kind.__name__} after {LIMIT_S} s")
