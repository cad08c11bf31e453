"""The command torchrun itself, as a user types it."""

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

import paceline as pl
from event_lines import read_events
from machine_speed import scaled
from paceline.recording.run_folder import EVENTS
from paths import environment
from ranks import free_port
from tiny_jobs import parameters_of, tiny_job
from torchrun import torchrun

pytestmark = pytest.mark.slow
SCRIPT = """
import os, signal
import paceline as pl
from tiny_jobs import tiny_job

class Kill(pl.callbacks.Callback):
    def on_update(self, update):
        if update.version == 25 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    result = pl.train(tiny_job(), protocol="bsp", cluster=pl.Torchrun(), stop="updates=40", out="run",
                      checkpoint_every="updates=10", callbacks=[Kill()])
    total = sum(float(each.double().sum()) for each in result.model.parameters())
    os.write(1, f"{os.environ['RANK']} {result.reason} {total:.12f}\\n".encode())  # whole, beside those of other ranks
"""


def test_the_command_line_writes_and_tells_once(tmp_path):
    arguments = ["digits", "--protocol", "k_sync(k=2)", "--cluster", "torchrun", "--stop", "updates=50", "--out", "run"]
    done = torchrun(tmp_path, "--nproc-per-node", "3", "-m", "paceline", "train", *arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert json.loads(line)["updates"] == 50
    assert read_events(tmp_path / "run" / EVENTS)[-1]["outcome"] == "updates"


def test_one_process_is_server_and_worker(tmp_path):
    arguments = ["digits", "--protocol", "asp", "--stop", "updates=20", "--out", "run"]
    done = torchrun(tmp_path, "--nproc-per-node", "1", "-m", "paceline", "train", *arguments)
    assert done.returncode == 0, done.stderr
    assert "20 updates made" in done.stdout


@pytest.mark.parametrize("at_server", [False, True])
def test_the_processes_of_a_host_are_one_worker(tmp_path, at_server):
    text = SCRIPT.replace("Torchrun()", f"Torchrun(worker_at_server={at_server}, workers='node')")
    (tmp_path / "script.py").write_text(text.replace("== 25", "== 1000"))
    done = torchrun(tmp_path, "--nproc-per-node", "3", "script.py")
    assert done.returncode == 0, done.stderr
    told = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert len(told) == 3
    assert len(set(told)) == 1
    arrived = [event for event in read_events(tmp_path / "run" / EVENTS) if event["event"] == "gradient_arrived"]
    assert len(arrived) == 40
    assert {(event["worker"], event["samples"]) for event in arrived} == {(0, 8)}


@pytest.mark.parametrize("at_server", [False, True])
def test_after_the_death_of_rank_0_torchrun_starts_the_job_again_and_it_goes_on(tmp_path, at_server):
    text = SCRIPT.replace("Torchrun()", f"Torchrun(worker_at_server={at_server})")
    (tmp_path / "script.py").write_text(text)
    done = torchrun(tmp_path, "--nproc-per-node", "3", "--max-restarts", "1", "script.py")
    assert done.returncode == 0, done.stderr
    told = sorted(line.split(" ", 1) for line in done.stdout.splitlines())
    assert [rank for rank, _ in told] == ["0", "1", "2"]
    assert len({said for _, said in told}) == 1
    assert "40 updates made" in told[0][1]
    [resumed] = [event for event in read_events(tmp_path / "run" / EVENTS) if event["event"] == "run_resumed"]
    assert resumed["version"] == 20


WITHOUT_A_SHARD = """
import os, psutil
import paceline as pl
from tiny_jobs import tiny_job, dataset

class Kill(pl.callbacks.Callback):
    def on_update(self, update):
        if update.version == 25 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            [server] = [each for each in psutil.process_iter() if is_slice(each)]
            server.FAULT()

def is_slice(process):
    try:
        return process.environ().get("PACELINE_SIDECAR") == "3" and process.cwd() == os.getcwd()
    except psutil.Error:
        return False

if __name__ == "__main__":
    result = pl.train(tiny_job(eval_data=dataset()), protocol="bsp", cluster=pl.Torchrun(shards=2), stop="updates=40",
                      out="run", checkpoint_every="updates=10", callbacks=[Kill()], worker_timeout_s=3.0)
    total = sum(float(each.double().sum()) for each in result.model.parameters())
    os.write(1, f"{os.environ['RANK']} {result.reason} {total:.12f}\\n".encode())  # whole, beside those of other ranks
"""


def started_in(folder):
    """Return the processes that were started in a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process] if process.cwd() == str(folder) else []
    return found


@pytest.mark.parametrize("fault", ["kill", "suspend"])
def test_after_the_death_or_silence_of_a_shard_torchrun_starts_the_job_again_and_it_goes_on(fault, tmp_path):
    (tmp_path / "script.py").write_text(WITHOUT_A_SHARD.replace("FAULT", fault))
    done = torchrun(tmp_path, "--nproc-per-node", "3", "--max-restarts", "1", "script.py")
    assert done.returncode == 0, done.stderr
    assert "the server of shard 1, beside rank 1, is gone" in done.stderr
    told = sorted(line.split(" ", 1) for line in done.stdout.splitlines())
    assert [rank for rank, _ in told] == ["0", "1", "2"]
    assert len({said for _, said in told}) == 1
    assert "40 updates made" in told[0][1]
    [resumed] = [event for event in read_events(tmp_path / "run" / EVENTS) if event["event"] == "run_resumed"]
    assert resumed["version"] == 20
    assert started_in(tmp_path) == []


SHARDS_OF_NODES = """
import os
import paceline as pl
from tiny_jobs import dataset, tiny_job

if __name__ == "__main__":
    job = tiny_job(batch_size=7, clip_norm=0.5, eval_data=dataset(20))
    cluster = pl.Torchrun(workers="node", shards=SHARDS)
    result = pl.train(job, protocol="bsp", cluster=cluster, stop="updates=15", seed=1, out="run")
    numbers = [each.double().flatten().tolist() for each in result.model.parameters()]
    with open(f"rank-{os.environ['RANK']}.json", "w") as file:
        file.write(str(sum(numbers, [])))
"""


def trained_on_two_hosts(folder, shards):
    """Return the parameters that each of four ranks, two on each of two "hosts", has at the end."""
    folder.mkdir()
    (folder / "script.py").write_text(SHARDS_OF_NODES.replace("SHARDS", str(shards)))
    where = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda host: torchrun(folder, *where, "--node-rank", str(host), "script.py"), range(2)))
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr
    assert started_in(folder) == []
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


def test_hosts_that_are_workers_reach_with_shards_the_parameters_that_they_reach_without(tmp_path):
    whole, sharded = (trained_on_two_hosts(tmp_path / str(shards), shards) for shards in (1, 2))
    job = tiny_job(batch_size=7, clip_norm=0.5)
    simulated = pl.train(job, protocol="bsp", cluster=pl.Cluster(2), stop="updates=15", seed=1)
    for parameters in (*whole, *sharded):
        assert parameters == pytest.approx(whole[0], rel=1e-12)
    assert whole[0] == pytest.approx(parameters_of(simulated.model).tolist(), rel=1e-12)
    arrived = [event for event in read_events(tmp_path / "2/run" / EVENTS) if event["event"] == "gradient_arrived"]
    assert Counter(event["worker"] for event in arrived) == {0: 15, 1: 15}


def test_only_rank_0_needs_the_folder_of_a_run_that_is_resumed(tmp_path):
    folders = [tmp_path / name for name in ("here", "elsewhere")]
    for folder in folders:
        folder.mkdir()
    port = str(free_port())

    def run(*arguments):
        started = []
        for rank, folder in enumerate(folders):
            told = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables = environment(**told, PACELINE_TOKEN="x")
            command = [
                sys.executable,
                "-m",
                "paceline",
                "train",
                "digits",
                "--protocol",
                "bsp",
                "--cluster",
                "torchrun",
            ]
            started.append(subprocess.Popen([*command, *arguments], cwd=folder, env=variables))
        assert [process.wait(scaled(60)) for process in started] == [0, 0]

    run("--stop", "updates=20", "--out", "run")
    run("--stop", "updates=30", "--resume", "run")
    assert read_events(folders[0] / "run" / EVENTS)[-1]["outcome"] == "updates"
    assert list(folders[1].iterdir()) == []
