"""Real ranks on this machine: what they decide, and what becomes of them, scripted by (worker, draw)."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import paceline as pl
from end_when import FOREVER, EndWhen
from machine_speed import scaled
from paceline.core.records import GradientArrived, WorkerJoined, WorkerLost
from paceline.engines.distributed.allreduce.membership import MembershipServer
from paceline.engines.distributed.parameter_server.remote_workers import RemoteWorkers
from ranks import free_port, lost, ranks, run, used_by
from this_process import wait_until, what_is_open
from tiny_counting import BATCH, counting_job, times_applied
from tiny_jobs import tiny_job

EXACT = 1e-12


@pytest.mark.processes
def test_a_killed_worker_is_lost_at_once_and_one_that_comes_back_does_its_share():
    epochs, samples = 3, 8 * BATCH
    faults = [pl.Fault(worker=0, draw=9), pl.Fault(worker=1, draw=3)]  # then no worker is left
    train = counting_job(samples)
    killed_s = []

    def come_back():
        job.processes[2].join(scaled(60))  # worker 1
        killed_s.append(time.time())
        job.processes[1].join(scaled(60))
        job.start(2)

    with (
        ranks(3, train, {"faults": faults}, protocol="bsp", stop=f"epochs={epochs}") as job,
        ThreadPoolExecutor() as pool,
    ):
        job.start_workers()
        pool.submit(come_back)
        begun_s = time.time()
        end = job.serve()
    assert [worker for worker, _ in lost(end)] == [1, 0]
    assert all("closed" in reason or "reset" in reason for _, reason in lost(end))
    assert end.of(WorkerLost)[0].now_s < killed_s[0] - begun_s + 1.0
    assert used_by(end, 0) == 8  # two with the other one, and then alone
    assert [record.worker for record in end.of(WorkerJoined)] == [1]
    model = train.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples


@pytest.mark.slow
def test_a_worker_that_is_told_to_end_hands_in_what_it_has():
    slow = pl.Cluster(2, timing=pl.timing.Deterministic(0.6))
    with ranks(3, tiny_job(), {"slowness": slow}, protocol="asp", stop="updates=12") as job:
        job.start_all()
        job.await_training()
        os.kill(job.processes[1].pid, signal.SIGTERM)
        with pytest.raises(SystemExit) as left:
            job.end(1)
        assert left.value.code == 128 + signal.SIGTERM  # without torchrun, another process is to take its place
        end = job.end(0)
    assert lost(end) == [(0, "SIGTERM")]
    assert end.stopped_by == "updates"
    gone_s = end.of(WorkerLost)[0].now_s
    last_s = max(record.now_s for record in end.of(GradientArrived) if record.worker == 0)
    assert gone_s - last_s < 0.5  # not in the middle of its work


@pytest.mark.slow
def test_workers_end_when_their_server_is_gone():
    slow = pl.Cluster(2, timing=[pl.timing.Deterministic(0.01), pl.timing.Deterministic(20.0)])
    with ranks(3, tiny_job(), {"slowness": slow}, protocol="asp", stop=FOREVER) as job:
        job.start_all()
        job.await_training()
        job.processes[0].kill()
        begun_s = time.monotonic()
        for rank in (1, 2):
            with pytest.raises(pl.RunError, match="rank 0 is gone"):
                job.end(rank)
        assert time.monotonic() - begun_s < 10.0  # and not after 20 s of sleep


@pytest.mark.slow
def test_the_traceback_of_a_failed_worker_is_in_the_log_of_its_rank_alone():
    with ranks(
        3, tiny_job(), {"faults": [pl.Fault(worker=1, draw=3, kind="raise")]}, protocol="bsp", stop="updates=30"
    ) as job:
        job.start_all()
        with pytest.raises(RuntimeError, match="scripted fault at draw 3"):
            job.end(2)
        assert lost(job.end(0)) == [(1, "RuntimeError: scripted fault at draw 3")]
        assert "worker 1 failed: RuntimeError: scripted fault at draw 3; its own log has the traceback" in job.said(0)
        assert ["Traceback" in job.said(rank) for rank in range(3)] == [False, False, True]


@pytest.mark.slow
def test_a_port_in_use_and_a_rank_that_does_not_come():
    with ranks(2, tiny_job(), {"start_timeout_s": 1.0}, protocol="bsp", stop="updates=3") as job:
        job.start(0)
        with pytest.raises(pl.RunError, match=r"worker 0 did not join within start_timeout_s=1"):
            job.end(0)
        job.start(1)
        with pytest.raises(pl.RunError, match=r"rank 0 could not be reached at 127.0.0.1:\d+ within start_timeout_s=1"):
            job.end(1)
    with ranks(2, tiny_job(), {"address": f"127.0.0.1:{free_port()}"}, protocol="bsp", stop=FOREVER) as job:
        job.start_all()
        job.await_training()
        job.start(0)
        with pytest.raises(pl.UsageError, match=r"cannot listen on 127.0.0.1:\d+ \(Address already in use\)"):
            job.end(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [None, pl.Fault(worker=1, draw=3), pl.Fault(worker=0, draw=3, kind="hang")],
    ids=["healthy", "killed", "hung"],
)
def test_rank_0_leaves_nothing_behind(fault):
    def has_fired(seen):
        if fault is None:
            return seen.updates >= 20
        return seen.used[fault.worker] == 2 and seen.used[1 - fault.worker] >= 20

    run(3, tiny_job(), protocol="asp", stop="updates=20")  # the first one starts what is there for good
    before = what_is_open()
    settings = {"protocol": "k_async(k=1)", "stop": FOREVER, "callbacks": [EndWhen(has_fired)]}
    with ranks(3, tiny_job(), {"faults": [fault] if fault else []}, **settings) as job:
        job.start_workers()
        assert job.serve().stopped_by == "interrupted"
    del job  # with the pipes to its ranks
    assert what_is_open() == before


@pytest.mark.slow
def test_rank_0_leaves_nothing_behind_when_the_run_fails():
    run(2, tiny_job(), protocol="bsp", stop="updates=2")
    before = what_is_open()
    with (
        ranks(2, tiny_job(), {"start_timeout_s": 0.5}, protocol="bsp", stop="updates=2") as job,
        pytest.raises(pl.RunError, match="worker 0 did not join"),
    ):
        job.serve()
    assert what_is_open() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "part", "name"),
    [
        ("asp", RemoteWorkers, "_send_end"),
        pytest.param("all_reduce", MembershipServer, "close", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_admitted", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_worker_that_comes_back_as_the_run_ends_leaves_with_status_0(protocol, part, name, is_admitted, monkeypatch):
    end_run = getattr(part, name)

    def come_back_first(self, *arguments):
        acceptor = self._acceptor if part is MembershipServer else self.processes._acceptor
        if is_admitted:  # before rank 0 sends the end of the run
            before = admitted(acceptor)
            job.start(1)
            wait_until(lambda: admitted(acceptor) - before)
        else:
            announce = acceptor.announce_end
            monkeypatch.setattr(acceptor, "announce_end", lambda end: (announce(end), come_too_late()))
        end_run(self, *arguments)

    def admitted(acceptor):
        return {peer_id for peer_id, served in list(acceptor._connections.items()) if not served.is_undecided}

    def come_too_late():
        job.start(1)
        wait_until(lambda: "the run has ended already" in job.said(1))

    monkeypatch.setattr(part, name, come_back_first)
    torchrun = {"min_workers": 1} if protocol == "all_reduce" else None
    with ranks(2, tiny_job(), torchrun, protocol=protocol, stop="updates=5") as job:
        job.start(1)
        assert job.serve().reason == "5 updates made"
        with pytest.raises(SystemExit) as left:
            job.end(1)
        assert left.value.code == 0
        assert "[rank 1] the run has ended already (5 updates made): this process exits" in job.said(1)


@pytest.mark.slow
def test_two_runs_of_one_script_follow_each_other():
    """The end of the first one does not turn its workers away from the second one."""
    with ranks(2, tiny_job(), protocol="asp", stop="updates=3") as job:
        job.start(1, prepare=train_once_before)
        for _ in range(2):
            assert job.serve().reason == "3 updates made"
        assert job.end(1).reason == "3 updates made"


def train_once_before():
    once = pl.train(
        tiny_job(), cluster=pl.Torchrun(start_timeout_s=scaled(30.0)), protocol="asp", stop="updates=3", seed=1
    )
    assert once.reason == "3 updates made"
