"""Processes of attached loops that are killed, end by SIGTERM, or come back: every sample is applied once an epoch."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from faulty_loop import EPOCHS, SAMPLES
from machine_speed import scaled
from paceline.core.events import END_OF_LOOP
from paceline.core.records import UpdateMade, WorkerJoined, WorkerLost
from paceline.recording.run_folder import MODEL, SavedRun
from paths import environment
from ranks import TOKEN, free_port

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "support/attached/faulty_loop.py"
LIMIT_S = scaled(100)
KILL, TERMINATE = "SIGKILL", "SIGTERM"


class Ranks:
    """Processes that are started without an agent, which would end all of them with the first one."""

    def __init__(self, folder, count, settings):
        self._folder = folder
        self._settings = json.dumps({**settings, "attach": {"out": "run", **settings.get("attach", {})}})
        self._variables = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "PACELINE_TOKEN": TOKEN,
        }
        self.processes = {}
        for rank in range(count):
            self.start(rank)

    def start(self, rank):
        variables = {**self._variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        self.processes[rank] = subprocess.Popen(
            [sys.executable, SCRIPT, self._settings],
            cwd=self._folder,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, rank, status=0):
        """Return the answer of a rank, if it has one, and what it has written to its standard error."""
        process = self.processes[rank]
        stdout, stderr = process.communicate(timeout=LIMIT_S)
        assert process.returncode == status, stderr
        answers = [line.partition("ANSWER ")[2] for line in stdout.splitlines() if "ANSWER " in line]
        return (json.loads(answers[0]) if answers else None), stderr

    def kill(self):
        for process in self.processes.values():
            process.kill()
            process.communicate()


@pytest.fixture
def start(tmp_path):
    started = []

    def start(count, **settings):
        started.append(Ranks(tmp_path, count, settings))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()


def losses(folder):
    """Return the reasons of losses, without the ranks that have ended their loops before the run has ended."""
    lost = SavedRun(folder / "run").history.of(WorkerLost)
    return {record.worker: record.reason for record in lost if record.reason != END_OF_LOOP}


@pytest.mark.parametrize("server", ["true", "false"])
def test_the_state_of_rank_0_begins_the_run_and_comes_back(server, start):
    # Of a sample that is not used, the momentum buffer is multiplied by 2 in each update.
    attach = {"stop": "updates=3", "cluster": f"torchrun(server={server})"}
    ranks = start(2, protocol="bsp", faults={}, momentum=2.0, first_state=1.0, attach=attach)
    answers = [ranks.end(rank)[0] for rank in range(2)]
    assert answers[0]["counts"] == answers[1]["counts"]
    assert answers[1]["state"] == ({} if server == "true" else answers[0]["state"])
    [buffer] = answers[0]["state"].values()
    used = [value < 8 for value in buffer]  # a gradient is negative
    assert 0 < sum(used) < SAMPLES
    assert all(value == 8 for value, is_used in zip(buffer, used, strict=True) if not is_used)
    assert all(answer["is_default"] for answer in answers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_killed_rank_and_one_that_comes_back(num_workers, start, tmp_path):
    faults = {"1": (2, KILL), "2": (3, KILL)}
    patient = {"worker_timeout_s": scaled(120)}  # two ranks wait until the lost one has started again
    ranks = start(4, protocol="k_sync(k=1)", faults=faults, free_steps=5, num_workers=num_workers, attach=patient)
    for rank in (1, 2):
        ranks.end(rank, -signal.SIGKILL)
    ranks.start(2)
    answers = [ranks.end(rank)[0] for rank in (0, 2, 3)]
    assert all((tmp_path / f"{rank} fired").exists() for rank in faults)
    assert [answer["counts"] for answer in answers] == [[EPOCHS] * SAMPLES] * 3
    assert losses(tmp_path).keys() == {1, 2}
    assert [record.worker for record in SavedRun(tmp_path / "run").history.of(WorkerJoined)] == [2]


def test_a_rank_that_gets_sigterm_hands_in_its_gradient_and_leaves(start, tmp_path):
    ranks = start(3, protocol="k_sync(k=1)", faults={"1": (2, TERMINATE)})
    _, stderr = ranks.end(1, 128 + signal.SIGTERM)
    answers = [ranks.end(rank)[0] for rank in (0, 2)]
    assert "worker 1 leaves the run: SIGTERM" in stderr
    assert losses(tmp_path)[1] == "SIGTERM"
    assert [answer["counts"] for answer in answers] == [[EPOCHS] * SAMPLES] * 2


def test_sigterm_at_rank_0_ends_the_run_of_all_ranks(start, tmp_path):
    ranks = start(2, protocol="bsp", faults={"0": (3, TERMINATE)}, attach={"on_end": "return"})
    answers = [ranks.end(rank)[0] for rank in range(2)]
    assert [answer["stopped_by"] for answer in answers] == ["interrupted"] * 2
    assert answers[0]["counts"] == answers[1]["counts"]


@pytest.mark.parametrize("protocol", ["bsp", "all_reduce"])
def test_ctrl_c_at_all_ranks_ends_them_without_a_traceback_and_with_one_line_of_rank_0(protocol, start, tmp_path):
    ranks = start(2, protocol=protocol, faults=dict.fromkeys("01", (3, "SIGINT")))
    errors = [ranks.end(rank, 130)[1] for rank in range(2)]
    assert not any("Traceback" in each for each in errors)
    told = [f"; resume it with resume='{tmp_path / 'run'}' in place of out=" in each for each in errors]
    assert told == [True, False]


def test_the_death_of_rank_0_is_an_error_of_the_others(start):
    ranks = start(2, protocol="bsp", faults={"0": (3, KILL)})
    ranks.end(0, -signal.SIGKILL)
    _, stderr = ranks.end(1, 1)
    assert stderr.splitlines()[-1].endswith(
        "RunError: the coordinator: rank 0 is gone: its process ended within the run"
    )


def test_a_killed_server_is_named_on_every_rank(start):
    ranks = start(2, protocol="bsp", faults={"0": (3, KILL, "of the server")})
    for rank, expected in enumerate(["of the run ended with status -9", "beside rank 0 is gone"]):
        _, stderr = ranks.end(rank, 1)
        assert re.search(rf"(RunError|ServerLostError): the coordinator {expected}", stderr.splitlines()[-1])


@pytest.mark.parametrize(
    ("protocol", "server", "fault"),
    [("k_sync(k=1)", "false", KILL), ("k_sync(k=1)", "false", "raise"), ("asp", "true", KILL)],
)
def test_a_standby_goes_on_without_rank_0(protocol, server, fault, tmp_path):
    attach = {"cluster": f"torchrun(standby=1,server={server})"}
    ranks = Ranks(tmp_path, 3, {"protocol": protocol, "faults": {"0": [4, fault]}, "attach": attach})
    _, stderr = ranks.end(0, 1 if fault == "raise" else -signal.SIGKILL)
    assert (tmp_path / "0 fired").exists(), stderr
    answers = [ranks.end(rank) for rank in (1, 2)]
    for answer, stderr in answers:
        assert answer["counts"] == [EPOCHS] * SAMPLES, stderr
        assert answer["stopped_by"] == "epochs"
    assert "the standby takes its place" in answers[1][1]
    history = SavedRun(tmp_path / "run-standby").history
    assert [each.version for each in history.of(UpdateMade)] == list(range(1, history.totals.updates + 1))
    assert (tmp_path / "run-standby" / MODEL).exists()


def test_a_standby_that_was_not_needed_leaves_no_folder(tmp_path):
    ranks = Ranks(tmp_path, 3, {"protocol": "k_sync(k=1)", "faults": {}, "attach": {"cluster": "torchrun(standby=1)"}})
    for rank in range(3):
        answer, _ = ranks.end(rank)
        assert answer["counts"] == [EPOCHS] * SAMPLES
    assert not (tmp_path / "run-standby").exists()
