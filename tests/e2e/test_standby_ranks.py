"""A run of real processes whose rank 0 is killed, with a standby."""

import signal
import subprocess
import sys

import psutil
import pytest

import paceline as pl
from machine_speed import scaled
from paceline.clusters.launch_env import SIDECAR
from paceline.core.records import RunEnded, RunResumed, UpdateMade, VersionEvaluated
from paceline.recording.run_folder import SavedRun
from paths import environment
from ranks import free_port
from this_process import wait_until

LIMIT_S = scaled(120)
OPTIONS = "train digits --protocol bsp --evaluate-every updates=50 --cluster"
STANDBY = "torchrun(standby=1)"
SIGTERM_AT_THE_TAKEOVER = """
import os, signal, sys
from paceline.cli import main
from paceline.clusters.launch_env import SIDECAR

if SIDECAR in os.environ:
    from paceline.engines.distributed.standby.standby import Standby
    take_over = Standby._take_over

    def take_over_after_sigterm(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return take_over(*arguments)

    Standby._take_over = take_over_after_sigterm
main()
"""


def records(folder, kind):
    return SavedRun(folder).history.of(kind) if (folder / "events.jsonl").exists() else []


def start_ranks(folder, cluster, *program):
    """Return three ranks of a run in "safe", as processes of this program."""
    names = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [*program, *OPTIONS.split(), cluster, "--stop", "updates=1000000", "--out", "safe"],
            cwd=folder,
            env=environment(**names, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*is cut short")  # a record may be half written when it is read
@pytest.mark.parametrize(("cluster", "number"), [(STANDBY, 3), ("torchrun(server=false,standby=1)", 4)])
def test_the_standby_goes_on_evaluates_and_ends_as_rank_0_would(cluster, number, tmp_path):
    ranks = start_ranks(tmp_path, cluster, sys.executable, "-m", "paceline")
    try:
        wait_until(lambda: len(records(tmp_path / "safe", UpdateMade)) > 60)
        ranks[0].kill()
        folder = tmp_path / "safe-standby"
        wait_until(lambda: any(each.version > 200 for each in records(folder, VersionEvaluated)))
        [standby] = [
            each for each in psutil.Process(ranks[2].pid).children() if each.environ().get(SIDECAR) == str(number)
        ]
        ranks[2].terminate()
        said = [process.communicate(timeout=LIMIT_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [-signal.SIGKILL, 130, 128 + signal.SIGTERM], "\n".join(said)
    assert not standby.is_running()
    [resumed] = records(folder, RunResumed)
    made = [update.version for update in records(tmp_path / "safe", UpdateMade)]
    assert resumed.version >= made[-1] - 1
    updates = [update.version for update in records(folder, UpdateMade)]
    assert updates == list(range(1, len(updates) + 1))
    assert (folder / "model.safetensors").exists()
    assert pl.replay(folder).is_same
    assert sorted(each.name for each in tmp_path.iterdir()) == ["safe", "safe-standby"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*is cut short")  # a record may be half written when it is read
def test_sigterm_between_the_loss_of_rank_0_and_the_takeover_saves_the_run(tmp_path):
    (tmp_path / "command.py").write_text(SIGTERM_AT_THE_TAKEOVER)
    ranks = start_ranks(tmp_path, STANDBY, sys.executable, "command.py")
    folder = tmp_path / "safe-standby"
    try:
        wait_until(lambda: len(records(tmp_path / "safe", UpdateMade)) > 60)
        ranks[0].kill()
        wait_until(lambda: records(folder, RunEnded))
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    [end] = records(folder, RunEnded)
    assert end.reason == "interrupted by SIGTERM"
    assert (folder / "model.safetensors").exists()
