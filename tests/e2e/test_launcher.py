"""`paceline run` with real ranks: one is killed, and the run goes on."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

import launched_loop
import launched_standby
from launched_commands import await_records
from machine_speed import scaled
from paceline.clusters.job_token import make_token
from paceline.core.events import NOT_JOINED
from paceline.core.records import RunEnded, RunResumed, UpdateMade, WorkerJoined, WorkerLost
from paceline.recording.run_folder import MODEL, SavedRun
from paths import environment
from ranks import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LIMIT_S = scaled(200)
END_S = scaled(30)  # of which most is the end of the interpreters on a busy machine


def run(folder, script, *hosts, **variables):
    """Run a script under `paceline run` in a folder, one launcher for each host, and return what all have printed.

    Args:
        folder: folder in which they run.
        script: script and its arguments.
        hosts: options of the launcher of each host.
        variables: further variables.
    """
    command = [sys.executable, "-m", "paceline", "run"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launchers = [
        subprocess.Popen([*command, *map(str, [*host, *script])], cwd=folder, env=environment(**variables), **options)
        for host in hosts
    ]
    printed = [launcher.communicate(timeout=LIMIT_S)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0] * len(hosts), "\n".join(printed)
    return "".join(printed)


def lives(printed):
    """Return the number of restarts of each rank before the end of the run."""
    return {int(rank): int(restarts) for rank, restarts in re.findall(r"rank (\d) in life (\d+)", printed)}


def two_hosts():
    """Return the options of two launchers, of one rank each, and the token of the run."""
    endpoint = f"127.0.0.1:{free_port()}"
    hosts = [["--nnodes", 2, "--node-rank", node, "--rdzv-endpoint", endpoint] for node in range(2)]
    return hosts, {"PACELINE_TOKEN": make_token()}


@pytest.mark.parametrize("n_hosts", [1, 2])
def test_a_worker_that_is_killed_comes_back_and_rank_0_has_lived_on(n_hosts, tmp_path):
    hosts, variables = two_hosts() if n_hosts == 2 else ([["--nproc-per-node", 2]], {})
    assert lives(run(tmp_path, [launched_loop.__file__, "bsp", 1], *hosts, **variables)) == {0: 0, 1: 1}
    history = SavedRun(tmp_path / "run").history
    assert history.of(RunResumed) == []
    assert [record.worker for record in history.of(WorkerLost)] == [1]
    assert [record.worker for record in history.of(WorkerJoined)] == [1]


@pytest.mark.parametrize(
    ("protocol", "lost", "n_hosts"), [("bsp", 0, 1), ("bsp", 0, 2), ("all_reduce", 0, 1), ("all_reduce", 1, 1)]
)
def test_when_rank_0_is_lost_the_run_goes_on_from_its_last_checkpoint(protocol, lost, n_hosts, tmp_path):
    hosts, variables = two_hosts() if n_hosts == 2 else ([["--nproc-per-node", 2]], {})
    assert lives(run(tmp_path, [launched_loop.__file__, protocol, lost], *hosts, **variables))[0] == 1
    history = SavedRun(tmp_path / "run").history
    assert len(history.of(RunResumed)) == 1
    updates = [record.version for record in history.of(UpdateMade)]
    assert updates == list(range(1, len(updates) + 1))


def test_after_a_takeover_a_worker_that_is_killed_finds_the_standby_and_the_run_ends_well(tmp_path):
    printed = run(tmp_path, [launched_standby.__file__], ["--nproc-per-node", 3])
    assert "rank 0 was killed by SIGKILL; its standby goes on" in printed
    assert "the run goes on in run-standby" in printed
    history = SavedRun(tmp_path / "run-standby").history
    assert len(history.of(RunResumed)) == 1
    # On a busy machine the first gradient of a new process takes longer than others may: it is silent, and returns.
    ended = [record for record in history.of(WorkerLost) if record.reason != NOT_JOINED and not record.silent]
    assert [record.worker for record in ended] == [0]
    updates = [record.version for record in history.of(UpdateMade)]
    assert updates == list(range(1, len(updates) + 1))
    assert len(updates) > launched_standby.WORKER_0_AT
    assert (tmp_path / "run-standby" / MODEL).exists()


@pytest.mark.parametrize("protocol", ["bsp", "all_reduce"])
def test_ctrl_c_ends_the_ranks_within_seconds_and_says_once_how_to_resume(protocol, tmp_path):
    script = [launched_loop.__file__, protocol, "none"]
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", "3", *script]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    launcher = subprocess.Popen(command, cwd=tmp_path, env=environment(), **options)
    await_records(tmp_path / "run", UpdateMade, 20)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does; the ranks have sessions of their own
    printed, _ = launcher.communicate(timeout=END_S)
    assert launcher.returncode == 130, printed
    assert printed.count("; resume it with resume=") == 1
    assert printed.count("the run ended after") == 1
    assert "Traceback" not in printed
    assert psutil.wait_procs(processes, timeout=0)[1] == []
    [end] = SavedRun(tmp_path / "run").history.of(RunEnded)
    assert end.reason.startswith("interrupted by Ctrl-C")


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True)\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", "2", "script.py"]
    launcher = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    ranks = [psutil.Process(int(launcher.stdout.readline().split()[-1])) for _ in range(2)]
    launcher.kill()
    launcher.communicate()
    _, alive = psutil.wait_procs(ranks, timeout=scaled(10))
    assert [rank.status() for rank in alive if rank.status() != psutil.STATUS_ZOMBIE] == []
