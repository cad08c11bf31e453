"""A worker that is all processes of a host: the same gradient as of one process, and one end for all of them."""

import os
import signal
import time

import pytest
import torch
from torch.nn import functional as F

import paceline as pl
from benchmarks.namespaces import hosts
from hosts import Cut, need_hosts, ranks_on_hosts
from machine_speed import scaled
from paceline.core.records import DecisionMade, GradientArrived, WorkInterrupted
from ranks import flat, lost, ranks, run, used_by
from tiny_counting import BATCH, counting_job, times_applied
from tiny_jobs import largest_relative_difference, tiny_job

EXACT = 1e-12
NODE = {"workers": "node"}


def simulated(job, n, updates):
    return pl.train(
        job, protocol="bsp", cluster=pl.Cluster(n), stop=pl.Stop(updates=updates), seed=1
    ).model.state_dict()


@pytest.mark.processes
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_bsp_of_two_hosts_is_bsp_of_two_workers(shards):
    job = tiny_job(batch_size=7)
    torchrun = {**NODE, "shards": shards}
    ends = run(4, job, torchrun, nodes=2, protocol="bsp", stop="updates=15")  # one beside rank 0, two elsewhere
    expected = flat(simulated(job, 2, 15))
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), expected) < EXACT
        assert end.reason == "15 updates made"
    assert {record.worker for record in ends[0].of(GradientArrived)} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "nodes", "n"), [(2, 2, 1), (3, 1, 1), (4, 1, 1), (6, 2, 2)])
def test_groups_of_any_size(world_size, nodes, n):
    job = tiny_job(batch_size=4, microbatches=2, clip_norm=0.5)
    ends = run(world_size, job, NODE, nodes=nodes, protocol="bsp", stop="updates=15")
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(simulated(job, n, 15))) < EXACT


class SlowStep:
    """A step that takes a while, in one process of a host only."""

    def __init__(self, rank, seconds):
        self.rank, self.seconds = rank, seconds

    def __call__(self, model, batch):
        if os.environ["RANK"] == self.rank:
            time.sleep(self.seconds)
        return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.slow
@pytest.mark.parametrize("slow_rank", ["2", "3"], ids=["leader", "follower"])
def test_an_interrupt_ends_the_work_of_all_at_a_microbatch(slow_rank):
    job = tiny_job(loss=None, step=SlowStep(slow_rank, 0.2), batch_size=32, microbatches=16)  # 3.2 s
    quick = {**NODE, "slowness": pl.Cluster(2, timing=[pl.timing.Deterministic(0.05), pl.timing.Deterministic(1e-6)])}
    [end, *others] = run(4, job, quick, nodes=2, protocol="k_sync(k=1)", stop="updates=60")
    interrupted = end.of(WorkInterrupted)
    assert {record.worker for record in interrupted} == {1}
    assert used_by(end, 0) == 60
    assert all(torch.equal(flat(other.parameters), flat(end.parameters)) for other in others)
    begun = [record.now_s for record in interrupted]
    assert end.time_s > 2.0  # so it had not the time to end a single piece of its work
    assert len(begun) >= 5  # and began anew again and again


@pytest.mark.slow
@pytest.mark.parametrize("killed", [2, 3], ids=["leader", "follower"])
def test_a_process_that_dies_takes_its_group_with_it_and_the_group_comes_back(killed):
    epochs, samples = 30, 8 * BATCH
    train = counting_job(samples)
    # The other worker dies too, so that the run waits for this one.
    torchrun = {
        **NODE,
        "slowness": pl.Cluster(2, timing=pl.timing.Deterministic(0.03)),
        "faults": [pl.Fault(worker=0, draw=60)],
    }
    with ranks(4, train, torchrun, nodes=2, protocol="bsp", stop=f"epochs={epochs}") as job:
        job.start_all()
        job.await_training()
        job.processes[killed].kill()
        begun_s = time.monotonic()
        with pytest.raises(pl.RunError, match=r"a process of its host is gone|the first process of worker 1 is gone"):
            job.end(5 - killed)
        assert time.monotonic() - begun_s < 10.0
        job.processes[1].join(scaled(60))
        job.start(2)
        job.start(3)
        end = job.end(0)
        assert job.end(3).stopped_by == "epochs"
    assert sorted(worker for worker, _ in lost(end)) == [0, 1]
    model = train.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples


class FailingStep:
    """A step that fails in one process."""

    def __init__(self, rank, kind):
        self.rank, self.kind = rank, kind

    def __call__(self, model, batch):
        if os.environ["RANK"] == self.rank:
            raise self.kind("out of order")
        return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.slow
def test_rank_0_reports_the_error_of_a_follower():
    with ranks(
        4, tiny_job(loss=None, step=FailingStep("3", ValueError)), NODE, nodes=2, protocol="bsp", stop="updates=9"
    ) as job:
        job.start_all()
        assert lost(job.end(0)) == [(1, "ValueError: out of order")]
        assert "worker 1 failed: ValueError: out of order" in job.said(0)
        assert "Traceback" not in job.said(0)
        with pytest.raises(pl.RunError, match="ValueError: out of order"):
            job.end(2)
        with pytest.raises(ValueError, match="out of order"):
            job.end(3)


@pytest.mark.slow
def test_a_usage_error_of_a_follower_ends_the_run_of_all():
    with ranks(
        3, tiny_job(loss=None, step=FailingStep("2", pl.UsageError)), NODE, protocol="bsp", stop="updates=9"
    ) as job:
        job.start_all()
        for rank in range(3):
            with pytest.raises(pl.UsageError, match="out of order"):
                job.end(rank)


@pytest.mark.slow
@pytest.mark.parametrize("told", [2, 3], ids=["leader", "follower"])
def test_all_processes_of_a_group_leave_together(told):
    slow = {**NODE, "slowness": pl.Cluster(2, timing=pl.timing.Deterministic(0.1))}
    with ranks(4, tiny_job(), slow, nodes=2, protocol="asp", stop="updates=40") as job:
        job.start_all()
        job.await_training()
        os.kill(job.processes[told].pid, signal.SIGTERM)
        for rank in (2, 3):
            with pytest.raises(SystemExit) as left:
                job.end(rank)
            assert left.value.code == 128 + signal.SIGTERM
        end = job.end(0)
    assert lost(end) == [(1, "SIGTERM")]
    assert end.stopped_by == "updates"


@pytest.mark.slow
def test_ranks_with_other_kinds_of_workers_are_refused():
    with ranks(3, tiny_job(), NODE, protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.start(1)
        job.start(2, seed=2)
        with pytest.raises(pl.UsageError, match=r"process 1 of worker 0 .* differs .*seed 1, now 2"):
            job.end(2)
    with ranks(2, tiny_job(), protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.start(1, torchrun=NODE)
        for rank in range(2):
            with pytest.raises(pl.UsageError, match=r"workers process, now node"):
                job.end(rank)


@pytest.mark.slow
def test_an_incomplete_group_names_the_missing_processes():
    with ranks(4, tiny_job(), {**NODE, "start_timeout_s": 5.0}, protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.start(1)
        with pytest.raises(pl.RunError, match=r"processes 1, 2 of worker 0 did not join within start_timeout_s=5"):
            job.end(1)
        with pytest.raises(pl.RunError, match=r"worker 0 did not join"):
            job.end(0)


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_one_worker_that_is_lost_and_takes_part_again():
    need_hosts()
    slow = {**NODE, "slowness": pl.Cluster(2, timing=pl.timing.Deterministic(0.02))}
    rules = {"protocol": "bsp", "stop": "seconds=15", "worker_timeout_s": 1.5}
    with hosts(2) as made:
        cut = Cut(made, place=1, after=(1, 20), back_after_s=4.0)
        with ranks_on_hosts(made, [0, 0, 1, 1], tiny_job(), slow, [cut], **rules) as job:
            job.start_all()
            ends = [job.end(rank) for rank in range(4)]
    decided = [
        (record.worker, record.kind, record.now_s) for record in ends[0].of(DecisionMade) if record.kind == "lost"
    ]
    assert [worker for worker, _, _ in decided] == [1]
    back = [r.now_s for r in ends[0].of(GradientArrived) if r.worker == 1 and r.used and r.now_s > decided[0][2]]
    assert len(back) > 5
    assert all(torch.equal(flat(end.parameters), flat(ends[0].parameters)) for end in ends)
