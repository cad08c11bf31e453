"""Ranks with a parameter server, as threads: what they decide, and faults scripted by (worker, draw)."""

import signal
import threading

import pytest

import paceline as pl
from catalogue_table import TABLE
from end_when import FOREVER, EndWhen
from halves import halves_job
from machine_speed import scaled
from paceline.core.records import GradientArrived, RunResumed, WorkerJoined, WorkerLost, WorkInterrupted
from paceline.engines.distributed.parameter_server import remote_workers
from rank_threads import ranks, run
from ranks import flat, lost, used_by
from selections import each_value_once, parametrize_few
from this_process import what_is_open
from tiny_counting import BATCH, counting_job, tallying_job, times_applied
from tiny_jobs import batch_norm_net, dataset, largest_relative_difference, tiny_job

EXACT = 1e-12


def counts_of(end, job):
    model = job.model()
    model.load_state_dict(end.parameters)
    return times_applied(model)


def assert_is_simulation(ends, job, n, **settings):
    simulated = pl.train(job, cluster=pl.Cluster(n), seed=1, **settings)
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(simulated.model.state_dict())) < EXACT
        assert end.reason == simulated.reason


@parametrize_few(
    ("protocol", "n"),
    [("bsp", 3), ("asp", 1), ("bsp", 1), ("k_sync(k=3)", 3), ("bsp + local_steps(H=3, outer=nesterov)", 3)],
    keep=1,
)
def test_ranks_reach_the_parameters_of_the_simulation(protocol, n):
    job = tiny_job(model=batch_norm_net)
    settings = {"protocol": protocol, "stop": "updates=15"}
    assert_is_simulation(run(n + 1, job, **settings), job, n, **settings)


@pytest.mark.slow
def test_a_schedule_and_parameters_without_decay_are_those_of_the_simulation():
    schedule = pl.plans.LinearSchedule(check_every="gradients=12", total="gradients=60")
    job = tiny_job(model=batch_norm_net, schedule=schedule, no_decay_on=pl.jobs.BATCH_NORMS)
    ends = run(4, job, protocol="bsp", stop="updates=20")
    assert_is_simulation(ends, job, 3, protocol="bsp", stop="updates=20")
    assert [len(end.records) > 20 for end in ends] == [True, False, False, False]


SIMPLER = {"bsp", "backup", "pull", "k_batch_sync", "k_async", "asp", "ringmaster", "b_dbw"}  # others have their parts


@parametrize_few(
    "protocol",
    [
        pytest.param(str(row[1]), marks=pytest.mark.slow if str(row[1]).split("(")[0] in SIMPLER else ())
        for row in TABLE
    ],
    keep=1,
)
def test_every_protocol_runs_and_replays(protocol, tmp_path):
    ends = run(4, tiny_job(), protocol=protocol, stop="updates=30", out=tmp_path / "run")
    assert [end.stopped_by for end in ends] == ["updates"] * 4
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["asp + dc_asgd(lambda0=0.04)", "k_async(k=2) + staleness_weight"])
def test_stale_gradients_are_compensated(protocol):
    [end, *_] = run(4, tiny_job(), protocol=protocol, stop="updates=30")
    assert any(record.compensations for record in end.of(GradientArrived))


@pytest.mark.slow
def test_a_worker_beside_rank_0_evaluates():
    job = tiny_job(model=batch_norm_net, eval_data=dataset(20))
    settings = {"protocol": "bsp", "stop": "updates=12", "evaluate_every": "updates=4"}
    ends = run(3, job, **settings)
    simulated = pl.train(job, cluster=pl.Cluster(2), seed=1, **settings)
    assert ends[0].metrics["loss"] == pytest.approx(simulated.metrics["loss"], rel=EXACT)


# --- workers that leave, fail and come back ----------------------------------------------------------------------


def test_a_killed_worker_is_lost_at_once_and_one_that_comes_back_does_its_share():
    epochs, samples = 3, 8 * BATCH
    faults = [pl.Fault(worker=0, draw=9), pl.Fault(worker=1, draw=3)]  # after that no worker is left
    train = counting_job(samples)
    with ranks(3, train, {"faults": faults}, protocol="bsp", stop=f"epochs={epochs}") as job:
        job.start_all()
        job.join(2)  # worker 1
        job.join(1)
        job.start(2)
        end = job.end(0)
        assert job.faults("die") == 2
    assert [worker for worker, _ in lost(end)] == [1, 0]
    assert all("closed" in reason for _, reason in lost(end))
    assert used_by(end, 0) == 8  # two with the other one, and then alone
    assert [record.worker for record in end.of(WorkerJoined)] == [1]
    assert counts_of(end, train) == [epochs] * samples


@parametrize_few("shards", [1, 2], keep=1)
def test_every_sample_is_applied_exactly_once_an_epoch_though_workers_are_killed_and_come_back(shards):
    samples, n, epochs = 4 * BATCH * 5, 4, 3
    train = counting_job(samples) if shards == 1 else halves_job(samples)
    slow = pl.Cluster(n, timing=pl.timing.Exponential(0.02))
    faults = [pl.Fault(worker=worker, draw=draw) for worker, draw in enumerate([2, 3, 4, 2])]
    torchrun = {"slowness": slow, "faults": faults, "shards": shards}
    with ranks(n + 1, train, torchrun, protocol="k_async(k=2)", stop=f"epochs={epochs}") as job:
        job.start_all()
        for rank in (1, 4, 2, 3):
            job.join(rank)
            job.start(rank)
        end = job.end(0)
        assert job.faults("die") >= n
    assert len(lost(end)) >= n
    assert counts_of(end, train) == [epochs] * samples


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [1, 13])
def test_workers_killed_between_local_steps_come_back_and_every_sample_is_used_once_an_epoch(deaths):
    n, samples, epochs = 4, 20 * BATCH, 2 * deaths + 4
    # More than the deaths of each worker: work that is interrupted before it begins has no fault.
    faults = [
        pl.Fault(worker=worker, draw=draw, step=1 + draw // 2 % 3) for worker in range(n) for draw in range(2, 50, 2)
    ]
    protocol = "asp + local_steps(H=3)"
    with ranks(n + 1, tallying_job(samples), {"faults": faults}, protocol=protocol, stop=f"epochs={epochs}") as job:
        job.start_all()
        for death in range(1, deaths + 1):
            for rank in range(1, n + 1):
                job.join(rank)
                job.start(rank, **({"torchrun": {"faults": ()}} if death == deaths else {}))
        end = job.end(0)
        assert job.faults("die") == len(lost(end)) == n * deaths
    assert end.parameters["used"].tolist() == [epochs] * samples


@parametrize_few(
    ("worker", "draw", "protocol"),
    each_value_once([0, 2], [1, 2, 7], ["bsp", "asp", "k_async(k=2)"]),  # which interrupt no draw
    keep=1,
)
def test_a_worker_that_fails_at_any_draw_is_lost_and_the_others_go_on(worker, draw, protocol):
    with ranks(
        4,
        tiny_job(),
        {"faults": [pl.Fault(worker=worker, draw=draw, kind="raise")]},
        protocol=protocol,
        stop=FOREVER,
        callbacks=[EndWhen(lambda seen: seen.lost and seen.updates >= 20)],
    ) as job:
        job.start_workers()
        end = job.serve()
        with pytest.raises(RuntimeError, match=f"scripted fault at draw {draw}"):
            job.end(worker + 1)
    assert lost(end) == [(worker, f"RuntimeError: scripted fault at draw {draw}")]
    assert used_by(end, worker) <= draw - 1


def test_an_interrupted_worker_abandons_its_sleep_at_once_and_begins_anew():
    slow = pl.Cluster(2, timing=[pl.timing.Deterministic(0.01), pl.timing.Deterministic(30.0)])
    faults = [pl.Fault(worker=1, draw=draw) for draw in range(2, 500)]  # the next task that it begins is the end of it
    settings = {"protocol": "k_sync(k=1)", "stop": "seconds=25", "callbacks": [EndWhen(lambda seen: seen.lost)]}
    [end, *_] = run(3, tiny_job(), {"slowness": slow, "faults": faults}, **settings)
    assert end.stopped_by == "interrupted"  # its sleep is longer than the run may be
    assert {record.worker for record in end.of(WorkInterrupted)} == {1}
    assert [worker for worker, _ in lost(end)] == [1]


def test_a_gradient_that_is_not_finite_is_rejected():
    [end, *_] = run(
        3, tiny_job(), {"faults": [pl.Fault(worker=1, draw=7, kind="not_finite")]}, protocol="bsp", stop="updates=20"
    )
    assert [record.worker for record in end.of(GradientArrived) if record.reason == "not finite"] == [1]


def test_a_worker_that_is_to_end_sends_what_it_has():
    slow = pl.Cluster(2, timing=pl.timing.Deterministic(0.2))
    with ranks(3, tiny_job(), {"slowness": slow}, protocol="asp", stop="updates=12") as job:
        job.start_all()
        job.await_training()
        job.processes[1].leave("SIGTERM")
        with pytest.raises(SystemExit) as left:
            job.end(1)
        assert left.value.code == 128 + signal.SIGTERM
        end = job.end(0)
    assert lost(end) == [(0, "SIGTERM")]
    assert end.stopped_by == "updates"
    last_s = max(record.now_s for record in end.of(GradientArrived) if record.worker == 0)
    assert end.of(WorkerLost)[0].now_s - last_s < 0.15  # not in the middle of a task


def test_a_silent_worker_is_declared_lost_and_another_one_takes_its_place():
    has_hung = threading.Event()

    class Hung(EndWhen):
        def _count(self, record):
            super()._count(record)
            if self.used[0] == 3 and self.used[1] >= 3:
                has_hung.set()

    def is_back(seen):
        return seen.joined == [0] and seen.used_since[0] > 20

    settings = {"protocol": "bsp", "stop": FOREVER, "worker_timeout_s": 0.3}
    with ranks(
        3, tiny_job(), {"faults": [pl.Fault(worker=0, draw=4, kind="hang")]}, **settings, callbacks=[Hung(is_back)]
    ) as job:
        job.start_workers()
        threading.Thread(
            target=lambda: (has_hung.wait(scaled(10)), job.start(1, torchrun={"faults": []})), daemon=True
        ).start()
        end = job.serve()
        assert job.faults("hang") == 1
    assert (0, "replaced by another process") in lost(end)
    assert used_by(end, 0) >= 20


def test_a_run_without_workers_ends_when_none_comes():
    faults = [pl.Fault(worker=worker, draw=3) for worker in range(2)]
    with ranks(3, tiny_job(), {"faults": faults, "start_timeout_s": 0.5}, protocol="asp", stop=FOREVER) as job:
        job.start_workers()
        end = job.serve()
        assert job.faults("die") == 2
    assert end.reason == "all workers are gone and none has joined for 0.5 s"
    assert sorted(worker for worker, _ in lost(end)) == [0, 1]


# --- rank 0 ------------------------------------------------------------------------------------------------------


@parametrize_few("protocol", ["asp", "bsp"], keep=1)
def test_workers_end_when_rank_0_is_killed(protocol):
    slow = pl.Cluster(2, timing=[pl.timing.Deterministic(0.01), pl.timing.Deterministic(0.02)])
    # Its thread ends when no worker has come back.
    with ranks(3, tiny_job(), {"slowness": slow, "start_timeout_s": 1.5}, protocol=protocol, stop=FOREVER) as job:
        job.start_all()
        job.await_training()
        job.processes[0].kill()
        for rank in (1, 2):
            with pytest.raises(pl.RunError, match="rank 0 is gone"):
                job.end(rank)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    job = tiny_job(model=batch_norm_net)
    run(4, job, protocol="bsp", stop="updates=7", out=tmp_path / "run")
    [end, *_] = run(4, job, protocol="bsp", stop="updates=15", resume=tmp_path / "run")
    assert_is_simulation([end], job, 3, protocol="bsp", stop="updates=15")
    assert pl.replay(tmp_path / "run").is_same


def test_rank_0_that_fails_at_an_update_sends_its_error_and_its_run_is_resumed(tmp_path):
    class Failing(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == 12:
                raise RuntimeError("the disk is full")

    job = counting_job(16 * BATCH)
    settings = {"protocol": "bsp", "checkpoint_every": "updates=5", "stop": "epochs=3"}
    with ranks(3, job, **settings, out=tmp_path / "run", callbacks=[Failing()]) as started:
        started.start_workers()
        with pytest.raises(RuntimeError, match="the disk is full"):
            started.serve()
        for rank in (1, 2):
            with pytest.raises(pl.RunError, match="rank 0: the disk is full"):
                started.end(rank)
    end = run(3, job, **settings, resume=tmp_path / "run")[0]
    assert [record.version for record in end.of(RunResumed)] == [10]
    assert counts_of(end, job) == [3] * 16 * BATCH
    assert pl.replay(tmp_path / "run").is_same


FAULTS = {"healthy": None, "killed": pl.Fault(worker=1, draw=3), "hung": pl.Fault(worker=0, draw=3, kind="hang")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["healthy", "killed", "hung"])
def test_rank_0_leaves_nothing_behind(name, monkeypatch):
    fault = FAULTS[name]
    monkeypatch.setattr(remote_workers, "GRACE_S", 0.2)

    def has_fired(seen):
        if fault is None:
            return seen.updates >= 20
        return seen.used[fault.worker] == 2 and seen.used[1 - fault.worker] >= 20

    run(3, tiny_job(), protocol="asp", stop="updates=20")  # the first one starts what stays
    before = what_is_open()
    settings = {"protocol": "k_async(k=1)", "stop": FOREVER, "callbacks": [EndWhen(has_fired)]}
    with ranks(3, tiny_job(), {"faults": [fault] if fault else []}, **settings) as job:
        job.start_workers()
        assert job.serve().stopped_by == "interrupted"
        assert sum(job.faults(kind) for kind in ("die", "hang")) == bool(fault)
    del job
    assert what_is_open() == before
