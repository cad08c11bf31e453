"""Runs that lose the worker beside rank 0, which rank 0 starts again: ranks as threads."""

import logging
import threading

import pytest

import paceline as pl
from paceline.core.records import WorkerJoined, WorkerLost
from paceline.engines.distributed.parameter_server import sidecar_restarts
from paceline.engines.distributed.parameter_server.sidecar_restarts import SidecarRestarts
from rank_threads import LIMIT_S, ranks
from tiny_jobs import tiny_job
from waiting_jobs import waiting_for

with_and_without_a_server = pytest.mark.parametrize(
    "torchrun", [{"worker_at_server": True}, {"server": False}], ids=["server", "no server"]
)


@pytest.fixture(autouse=True)
def first_pause_s(monkeypatch):
    monkeypatch.setattr(sidecar_restarts, "FIRST_PAUSE_S", 0.01)


class Lose(pl.callbacks.Callback):
    """Callback that does something to the worker beside rank 0 with update 5, and notes that it joins."""

    def __init__(self, lose):
        self.has_joined = threading.Event()
        self.pauses = []  # number of pauses at each join
        self.job = None
        self._lose = lose

    def on_update(self, update):
        if update.version == 5:
            self._lose(self.job.processes["beside"])

    def on_record(self, record):
        super().on_record(record)
        if isinstance(record, WorkerJoined):
            self.pauses.append(sum(each.name == sidecar_restarts.PAUSE for each in threading.enumerate()))
            self.has_joined.set()


def run(torchrun, losing, train, stop, **settings):
    """Return the result of three ranks."""
    with ranks(3, train, torchrun, protocol="bsp", stop=stop, callbacks=[losing], **settings) as job:
        losing.job = job
        job.start_all()
        return job.end(0)


@with_and_without_a_server
@pytest.mark.parametrize("how", ["kill", "disconnect"])
def test_the_worker_beside_rank_0_comes_back(torchrun, how):
    losing = Lose(lambda process: getattr(process, how)())
    train = waiting_for(losing.has_joined, tiny_job(), gradients=20)
    end = run(torchrun, losing, train, "updates=20")
    assert end.reason == "20 updates made"
    assert [record.worker for record in end.of(WorkerLost)] == [0]
    assert [record.worker for record in end.of(WorkerJoined)] == [0]


def test_a_worker_that_comes_back_by_itself_is_not_replaced(monkeypatch):
    monkeypatch.setattr(sidecar_restarts, "FIRST_PAUSE_S", 60.0)
    losing = Lose(lambda process: process.disconnect())
    train = waiting_for(losing.has_joined, tiny_job(), gradients=20)
    end = run({"server": False, "standby": 1}, losing, train, "updates=20")
    assert [record.worker for record in end.of(WorkerJoined)] == [0]
    assert losing.pauses == [0], "the pause ends when the worker joins"


@with_and_without_a_server
def test_a_worker_that_leaves_on_purpose_is_not_started_again(torchrun):
    end = run(torchrun, Lose(lambda process: process.leave("SIGTERM")), tiny_job(), "updates=20")
    assert [record.worker for record in end.of(WorkerLost)] == [0]
    assert end.of(WorkerJoined) == []


def test_a_run_ends_while_the_worker_waits_for_its_restart(monkeypatch):
    monkeypatch.setattr(sidecar_restarts, "FIRST_PAUSE_S", 60.0)
    end = run({"worker_at_server": True}, Lose(lambda process: process.kill()), tiny_job(), "updates=20")
    assert end.reason == "20 updates made"
    assert not any(each.name == sidecar_restarts.PAUSE for each in threading.enumerate()), "the pause has ended"


class Process:
    """Sidecar that does nothing but note how long it may take to exit."""

    def __init__(self, stopped, status):
        self.status = status
        self._stopped = stopped

    def stop(self, timeout_s):
        self._stopped.append(timeout_s)


def test_the_pause_doubles_and_the_worker_is_started_as_often_as_a_rank(caplog):
    due, started, stopped = threading.Semaphore(0), [], []

    def start():
        started.append(Process(stopped, -9))
        return started[-1]

    restarts = SidecarRestarts(start, max_restarts=3, on_due=due.release)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            restarts.on_lost(0)
            assert due.acquire(timeout=LIMIT_S)
            restarts.start_again()
        restarts.on_lost(0)
    restarts.start_again()
    assert [record.message.split()[-2] for record in caplog.records] == ["0.01", "0.02", "0.04"]
    assert len(started) == 4
    assert stopped == [0.0] * 3, "a lost process that is left is killed at once"


def test_no_process_is_started_for_a_worker_that_has_come_back():
    due, started = threading.Semaphore(0), []
    restarts = SidecarRestarts(lambda: started.append(True), max_restarts=-1, on_due=due.release)
    restarts.on_lost(0)
    assert due.acquire(timeout=LIMIT_S)
    restarts.end_pause()
    restarts.start_again()
    assert len(started) == 1


def test_a_worker_that_fails_again_and_again_is_given_up(caplog):
    due, started = threading.Semaphore(0), []

    def start():
        started.append(Process([], 1))
        return started[-1]

    restarts = SidecarRestarts(start, max_restarts=-1, on_due=due.release)
    for _ in range(3):
        restarts.on_lost(0)
        assert due.acquire(timeout=LIMIT_S)
        restarts.start_again()
    assert len(started) == 3
    assert "failed 3 times in a row, and is left out" in caplog.text
