"""What the page on launching shows is run: its commands in namespaces that have its addresses."""

import os
import re
import signal
import subprocess

import pytest

from benchmarks.namespaces import hosts
from hosts import need_hosts
from launched_commands import (
    LIMIT_S,
    await_records,
    children,
    environment_of,
    environment_with,
    kill,
    outputs,
)
from paceline.clusters.job_token import make_token
from paceline.core.records import RunEnded, RunResumed, UpdateMade, WorkerJoined, WorkerLost
from paceline.recording.run_folder import SavedRun
from paths import ROOT

PAGE = (ROOT / "docs/how-to/launch-on-many-machines.md").read_text(encoding="utf-8")
BLOCK = r"^## ([^\n]+)\n(?:(?!^## ).)*?<!-- run by tests/e2e/test_launching.py -->\n```sh\n(.*?)```"
BLOCKS = dict(re.findall(BLOCK, PAGE, re.M | re.S))
SLURM = ROOT / "examples/slurm.sh"
pytestmark = pytest.mark.timeout(300)  # a command is seconds of importing for each rank
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1 2 3; do SLURM_NODEID=$node SLURM_NNODES=4 "$@" & done
wait
"""


def commands(title, *changes):
    """Return the commands of a block, what is set before them included, and the number of the host of each."""
    text = BLOCKS[title]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    before = "".join(f"{line}\n" for line in text.splitlines() if "# on" not in line)
    return [
        (f"{before}exec env {command}", int(host) - 1)
        for command, host in re.findall(r"^(.*?) +# on [\d.]+\.(\d+)$", text, re.M)
    ]


@pytest.fixture
def start(tmp_path):
    """Start commands on hosts; nothing of them is left afterwards."""
    need_hosts()
    started, token = [], make_token()

    def begin(made, command, host):
        in_namespace = ["ip", "netns", "exec", made.names[host], "bash", "-c", command]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        variables = {**environment_with(), "PACELINE_TOKEN": token}
        started.append(subprocess.Popen(in_namespace, cwd=tmp_path, env=variables, **options))
        return started[-1]

    yield begin
    for process in started:
        kill(process)


@pytest.mark.slow
def test_on_one_machine(tmp_path):
    [command] = BLOCKS["One machine"].splitlines()
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment_with(), capture_output=True, text=True, check=False
    )
    assert "30 updates made" in done.stdout, done.stderr


@pytest.mark.slow
def test_by_hand(start, tmp_path):
    with hosts(2) as made:
        told = outputs([start(made, command, host) for command, host in commands("By hand, on two hosts")])
    assert ["30 updates made" in text for text in told] == [True, False, False]
    assert (tmp_path / "runs/by-hand/model.safetensors").exists()


@pytest.mark.slow
def test_with_paceline_run(start):
    with hosts(2) as made:
        block = commands("With `paceline run`, on two hosts")
        told = outputs([start(made, command, host) for command, host in block])
    assert "30 updates made" in told[0]


@pytest.mark.slow
def test_with_torchrun(start):
    with hosts(2) as made:
        block = commands("With torchrun, on two hosts")
        told = outputs([start(made, command, host) for command, host in block])
    assert "30 updates made" in told[0]


@pytest.mark.slow
def test_a_rank_beyond_those_that_were_started_joins(start, tmp_path):
    folder = tmp_path / "runs/elastic"
    with hosts(2) as made:
        [*first, late] = commands("A size that changes", ("updates=60", "updates=1000000"))
        started = [start(made, command, host) for command, host in first]
        await_records(folder, UpdateMade, 3)
        started.append(start(made, *late))
        await_records(folder, WorkerJoined, 1)
        started[0].send_signal(signal.SIGTERM)
        told = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    assert [process.returncode for process in started] == [130] * 4, "\n".join(told)
    assert [record.worker for record in SavedRun(folder).history.of(WorkerJoined)] == [2]


@pytest.mark.slow
def test_a_host_of_torchrun_dies_and_another_one_takes_its_place(start, tmp_path):
    longer = [("--nproc-per-node 2", "--nproc-per-node 2 --monitor-interval 0.1"), ("updates=30", "seconds=40")]
    with hosts(2) as made:
        [(here, _), (there, _)] = commands("With torchrun, on two hosts", *longer)
        first, second = start(made, here, 0), start(made, there, 1)
        await_records(tmp_path / "runs/torchrun", UpdateMade, 20)
        kill(second)
        await_records(tmp_path / "runs/torchrun", WorkerLost, 2)
        outputs([first, start(made, there, 1)])
    history = SavedRun(tmp_path / "runs/torchrun").history
    assert history.of(RunResumed) == []  # no other process was restarted
    lost = [record.worker for record in history.of(WorkerLost)]
    assert sorted(lost) == sorted(record.worker for record in history.of(WorkerJoined)) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_rank_0_of_two_hosts_dies_and_the_run_goes_on(number, start, tmp_path):
    changes = [("--nproc-per-node 2", "--nproc-per-node 2 --monitor-interval 0.1"), ("updates=30", "updates=600")]
    changes.append(("--out", "--checkpoint-every updates=10 --out"))
    with hosts(2) as made:
        processes = [start(made, *each) for each in commands("With torchrun, on two hosts", *changes)]
        await_records(tmp_path / "runs/torchrun", UpdateMade, 40)
        os.kill(next(pid for pid in children(processes[0].pid) if environment_of(pid).get("RANK") == "0"), number)
        outputs(processes)
    history = SavedRun(tmp_path / "runs/torchrun").history
    assert len(history.of(RunResumed)) == 1
    assert [record.version for record in history.of(UpdateMade)] == list(range(1, 601))
    assert history.of(RunEnded)[-1].outcome == "updates"


@pytest.mark.slow
def test_with_slurm(tmp_path):
    stubs = {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n"}
    for name, text in stubs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "slurm.sh"
    for stop in ("updates=30", "updates=45"):  # the second time it goes on
        script.write_text(re.sub(r"--stop \w+=\d+", f"--stop {stop}", SLURM.read_text()))
        done = subprocess.run(
            ["bash", script], cwd=tmp_path, env=environment_with(tmp_path), capture_output=True, text=True, check=False
        )
        assert f"{stop.partition('=')[2]} updates made" in done.stdout, done.stderr
    assert len(SavedRun(tmp_path / "runs/digits").history.of(RunResumed)) == 1
