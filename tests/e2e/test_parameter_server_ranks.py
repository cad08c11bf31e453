"""Real ranks on this machine: what they decide, and what becomes of them, scripted by (worker, draw)."""

import dataclasses
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

import paceline as pl
from catalogue_table import TABLE
from end_when import FOREVER, EndWhen
from paceline.core.records import GradientArrived, WorkerJoined, WorkerLost, WorkInterrupted
from paceline.engines.distributed import ParameterServerEngine
from paceline.engines.distributed.allreduce.membership import MembershipServer
from ranks import flat, free_port, lost, ranks, run, used_by
from this_process import wait_until, what_is_open
from tiny_counting import BATCH, counting_job, times_applied
from tiny_jobs import batch_norm_net, largest_relative_difference, tiny_job

EXACT = 1e-12


@pytest.mark.processes
def test_bsp_is_bsp_of_the_simulation_and_every_rank_has_its_model():
    schedule = pl.LinearSchedule(check_every="gradients=12", total="gradients=120")
    job = tiny_job(model=batch_norm_net, schedule=schedule, no_decay_on=pl.BATCH_NORMS)
    ends = run(4, job, protocol="bsp", stop="updates=40")
    simulated = pl.train(job, protocol="bsp", cluster=pl.Cluster(3), stop="updates=40", seed=1)
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(simulated.model.state_dict())) < EXACT
        assert end.reason == "40 updates made"
    assert [len(end.records) > 40 for end in ends] == [True, False, False, False]


@pytest.mark.processes
def test_a_killed_worker_is_lost_at_once_and_one_that_comes_back_does_its_share():
    epochs, samples = 3, 8 * BATCH
    faults = [pl.Fault(worker=0, draw=9), pl.Fault(worker=1, draw=3)]  # after that there is nobody
    train = counting_job(samples)
    killed_s = []

    def come_back():
        job.processes[2].join(60)  # worker 1
        killed_s.append(time.time())
        job.processes[1].join(60)
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
def test_an_interrupted_worker_abandons_its_sleep_at_once_and_begins_anew():
    slow = pl.Cluster(2, timing=[pl.Deterministic(0.03), pl.Deterministic(30.0)])
    faults = [pl.Fault(1, draw) for draw in range(2, 500)]  # the next work that it begins is the end of it
    settings = {"protocol": "k_sync(k=1)", "stop": "seconds=25", "callbacks": [EndWhen(lambda seen: seen.lost)]}
    [end, *_] = run(3, tiny_job(), {"slowness": slow, "faults": faults}, **settings)
    assert end.stopped_by == "interrupted"  # its sleep is longer than the run may be
    assert {record.worker for record in end.of(WorkInterrupted)} == {1}
    assert [worker for worker, _ in lost(end)] == [1]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 2, "job": tiny_job(batch_size=4)}, r"seed 1, now 2; .*batch_size 8, now 4"),
        pytest.param({"protocol": "asp"}, "protocol bsp, now asp", marks=pytest.mark.slow),
        pytest.param({"torchrun": {"wire": "bf16"}}, "wire float32, now bf16", marks=pytest.mark.slow),
        pytest.param({"job": tiny_job(model=batch_norm_net)}, r"model .*1.weight not set.*", marks=pytest.mark.slow),
    ],
    ids=["seed and job", "protocol", "wire", "model"],
)
def test_ranks_that_do_not_agree_stop_with_the_difference(changes, said):
    with ranks(2, tiny_job(), protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.start(1, **changes)
        who = r"^(rank 0: )?worker 0 \(rank 1, .*, process \d+\) differs from rank 0"
        for rank in range(2):
            with pytest.raises(pl.UsageError, match=f"{who}: {said}: give every rank the same command and code$"):
                job.end(rank)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [str(row[1]) for row in TABLE])
def test_every_protocol_runs_and_replays(protocol, tmp_path):
    ends = run(4, tiny_job(), protocol=protocol, stop="updates=60", out=tmp_path / "run")
    assert [end.stopped_by for end in ends] == ["updates"] * 4
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["asp + dc_asgd(lambda0=0.04)", "k_async(k=2) + staleness_weight"])
def test_stale_gradients_are_compensated(protocol):
    [end, *_] = run(4, tiny_job(), protocol=protocol, stop="updates=60")
    assert any(record.compensations for record in end.of(GradientArrived))


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_rejected():
    [end, *_] = run(3, tiny_job(), {"faults": [pl.Fault(1, 7, "not_finite")]}, protocol="bsp", stop="updates=20")
    assert [record.worker for record in end.of(GradientArrived) if record.reason == "not finite"] == [1]


@pytest.mark.slow
def test_a_rank_with_another_token_is_turned_away_and_the_right_one_is_waited_for():
    with ranks(2, tiny_job(), protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.start(1, token="a guess")
        with pytest.raises(pl.UsageError, match="rank 0 has another token; set PACELINE_TOKEN to the same"):
            job.end(1)
        job.start(1)
        assert job.end(0).stopped_by == "updates"
        assert "rejected a connection: wrong token" in job.said(0)


@pytest.mark.slow
def test_a_worker_that_is_told_to_end_hands_in_what_it_has():
    slow = pl.Cluster(2, timing=pl.Deterministic(0.6))
    with ranks(3, tiny_job(), {"slowness": slow}, protocol="asp", stop="updates=12") as job:
        job.start_all()
        job.await_training()
        os.kill(job.processes[1].pid, signal.SIGTERM)
        with pytest.raises(SystemExit) as left:
            job.end(1)
        assert left.value.code == 128 + signal.SIGTERM  # without torchrun, somebody is to take its place
        end = job.end(0)
    assert lost(end) == [(0, "SIGTERM")]
    assert end.stopped_by == "updates"
    gone_s = end.of(WorkerLost)[0].now_s
    last_s = max(record.now_s for record in end.of(GradientArrived) if record.worker == 0)
    assert gone_s - last_s < 0.5  # not in the middle of its work


@pytest.mark.slow
def test_workers_end_when_their_server_is_gone():
    slow = pl.Cluster(2, timing=[pl.Deterministic(0.01), pl.Deterministic(20.0)])
    with ranks(3, tiny_job(), {"slowness": slow}, protocol="asp", stop=FOREVER) as job:
        job.start_all()
        job.await_training()
        job.processes[0].kill()
        begun_s = time.monotonic()
        for rank in (1, 2):
            with pytest.raises(pl.RunError, match="rank 0 is gone"):
                job.end(rank)
        assert time.monotonic() - begun_s < 10.0  # and not after 20 s of sleep


def wait_long_at_the_start():
    """Let rank 0, in this process, be as patient at the start as the others, and later as it was asked to be."""

    def start(self):
        asked, self._cluster = self._cluster, dataclasses.replace(self._cluster, start_timeout_s=60.0)
        original(self)
        self._cluster = asked

    original = ParameterServerEngine._start
    ParameterServerEngine._start = start


@pytest.mark.slow
def test_a_run_without_workers_ends_when_nobody_comes():
    faults = [pl.Fault(worker, 3) for worker in range(2)]
    with ranks(3, tiny_job(), {"faults": faults}, protocol="asp", stop=FOREVER) as job:
        job.start_workers()
        job.start(0, torchrun={"start_timeout_s": 0.5}, prepare=wait_long_at_the_start)
        end = job.end(0)
    assert end.reason == "all workers are gone and none has joined for 0.5 s"
    assert sorted(worker for worker, _ in lost(end)) == [0, 1]


@pytest.mark.slow
def test_a_silent_worker_is_declared_lost_and_another_process_takes_its_place():
    faults = [pl.Fault(0, 4, "hang")]
    settings = {"protocol": "bsp", "stop": FOREVER, "worker_timeout_s": 1.0, "callbacks": [EndWhen(_is_back)]}
    with ranks(3, tiny_job(), {"faults": faults}, **settings) as job:
        job.start_all()
        job.await_loss()
        job.start(1)
        end = job.end(0)
    assert (0, "replaced by another process") in lost(end)
    assert used_by(end, 0) >= 100


def _is_back(seen):
    return seen.joined == [0] and seen.used_since[0] > 100


@pytest.mark.slow
def test_the_traceback_of_a_failed_worker_is_in_the_log_of_its_rank_alone():
    with ranks(3, tiny_job(), {"faults": [pl.Fault(1, 3, "raise")]}, protocol="bsp", stop="updates=30") as job:
        job.start_all()
        with pytest.raises(RuntimeError, match="scripted fault at draw 3"):
            job.end(2)
        assert lost(job.end(0)) == [(1, "RuntimeError: scripted fault at draw 3")]
        assert "worker 1 failed: RuntimeError: scripted fault at draw 3; its own log has the traceback" in job.said(0)
        assert ["Traceback" in job.said(rank) for rank in range(3)] == [False, False, True]


@pytest.mark.slow
def test_a_loss_that_is_no_scalar_stops_every_rank_with_one_line():
    job = tiny_job(loss=nn.CrossEntropyLoss(reduction="none"))
    with ranks(2, job, protocol="bsp", stop="updates=30") as started:
        started.start_all()
        for rank in range(2):
            with pytest.raises(pl.UsageError, match=r"the loss is not a scalar"):
                started.end(rank)


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
def test_every_sample_is_applied_exactly_once_an_epoch_though_workers_are_killed_and_come_back():
    samples, n, epochs = 4 * BATCH * 5, 4, 3
    slow = pl.Cluster(n, timing=pl.Exponential(0.2))
    faults = [pl.Fault(worker, draw) for worker, draw in enumerate([2, 3, 4, 2])]
    settings = {"protocol": "k_async(k=2)", "stop": f"epochs={epochs}"}
    with ranks(n + 1, counting_job(samples), {"slowness": slow, "faults": faults}, **settings) as job:
        job.start_all()
        for rank in (1, 4, 2, 3):
            job.processes[rank].join(60)
            job.start(rank)
        end = job.end(0)
    assert len(lost(end)) == n
    model = counting_job(samples).model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, pl.Fault(1, 3), pl.Fault(0, 3, "hang")], ids=["healthy", "killed", "hung"])
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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("protocol", "part", "name"),
    [
        ("asp", ParameterServerEngine, "_send_end"),
        pytest.param("all_reduce", MembershipServer, "close", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_admitted", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_worker_that_comes_back_as_the_run_ends_leaves_with_status_0(protocol, part, name, is_admitted, monkeypatch):
    end_run = getattr(part, name)

    def come_back_first(self, *arguments):
        acceptor = self._acceptor
        if is_admitted:  # before rank 0 sends the end of the run
            come_back(acceptor)
            wait_until(lambda: not acceptor._undecided)
            end_run(self, *arguments)
        else:
            announce = acceptor.announce_end
            monkeypatch.setattr(acceptor, "announce_end", lambda end: (announce(end), come_back(None)))
            end_run(self, *arguments)

    def come_back(acceptor):
        job.start(1)
        if acceptor is not None:
            wait_until(lambda: len(acceptor._threads) > 2)
        else:
            wait_until(lambda: "the run has ended already" in job.said(1))

    monkeypatch.setattr(part, name, come_back_first)
    torchrun = {"elastic": True} if protocol == "all_reduce" else None
    with ranks(2, tiny_job(), torchrun, protocol=protocol, stop="updates=5") as job:
        job.start(1)
        assert job.serve().reason == "5 updates made"
        with pytest.raises(SystemExit) as left:
            job.end(1)
        assert left.value.code == 0
        assert "[rank 1] the run has ended already (5 updates made): this process exits" in job.said(1)


@pytest.mark.processes
def test_two_runs_of_one_script_follow_each_other():
    """The end of the first one does not turn its workers away from the second one."""
    with ranks(2, tiny_job(), protocol="asp", stop="updates=3") as job:
        job.start(1, prepare=train_once_before)
        for _ in range(2):
            assert job.serve().reason == "3 updates made"
        assert job.end(1).reason == "3 updates made"


def train_once_before():
    once = pl.train(tiny_job(), cluster=pl.Torchrun(start_timeout_s=30.0), protocol="asp", stop="updates=3", seed=1)
    assert once.reason == "3 updates made"
