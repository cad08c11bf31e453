"""Runs that begin without some workers, and that grow and shrink: ranks as threads."""

import threading

import pytest
import torch

import paceline as pl
from end_when import FOREVER, EndWhen
from paceline.core.records import GradientArrived, RunResumed, UpdateMade, WorkerJoined, WorkerLost
from rank_threads import ranks, run
from ranks import flat, lost, used_by
from selections import parametrize_few
from tiny_counting import BATCH, counting_job, times_applied
from tiny_jobs import tiny_job
from waiting_jobs import waiting_for

OPEN = {"max_workers": 4}


class Starting(pl.callbacks.Callback):
    """Callback that starts ranks with the second update, and tells when they have joined."""

    def __init__(self, *ranks):
        self.job = None
        self.have_joined = threading.Event()
        self._ranks = ranks
        self._joined = 0

    def on_record(self, record):
        super().on_record(record)
        self._joined += isinstance(record, WorkerJoined)
        if self._joined == len(self._ranks):
            self.have_joined.set()

    def on_update(self, update):
        if update.version == 2:
            for rank in self._ranks:
                self.job.start(rank)


@parametrize_few("protocol", ["bsp", "k_async(k=2)"], keep=1)
def test_a_run_grows_and_shrinks_and_uses_every_sample_once_an_epoch(protocol):
    samples, epochs = 24 * BATCH, 3
    starting = Starting(3, 4)
    train = counting_job(samples)
    gated = waiting_for(starting.have_joined, train, gradients=10)
    torchrun = {**OPEN, "faults": [pl.Fault(worker=2, draw=6), pl.Fault(worker=3, draw=5)]}
    settings = {"protocol": protocol, "stop": f"epochs={epochs}", "callbacks": [starting]}
    with ranks(3, gated, torchrun, **settings) as job:
        starting.job = job
        job.start_all()
        end = job.end(0)
        assert job.faults("die") == 2
    assert sorted(record.worker for record in end.of(WorkerJoined)) == [2, 3]
    assert sorted(worker for worker, _ in lost(end)) == [2, 2, 3, 3]  # not there yet, and dead
    assert used_by(end, 2) >= 2
    model = train.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples


@parametrize_few(
    ("protocol", "late"),
    [("k_sync(k=3)", 3), ("all_reduce", 2), pytest.param("dc_s3gd", 2, marks=pytest.mark.slow)],
    keep=1,
)
def test_a_run_begins_without_a_worker_that_is_late_and_admits_it_later(protocol, late, caplog):
    def is_complete(seen):
        return seen.joined == [2] and seen.used_since[2] >= 3

    starting = Starting(late)
    torchrun = {"min_workers": 2, "start_timeout_s": 0.5}
    callbacks = [starting, EndWhen(is_complete)]
    with ranks(late + 1, tiny_job(), torchrun, protocol=protocol, stop=FOREVER, callbacks=callbacks) as job:
        starting.job = job
        for rank in range(1, late):
            job.start(rank)
            job.started(rank)
        end = job.serve()
    assert "worker 2 did not join within start_timeout_s=0.5: the run begins without" in caplog.text
    assert [(record.worker, record.reason) for record in end.of(WorkerLost)] == [(2, "it has not joined yet")]
    assert {update.k for update in end.of(UpdateMade)} == {2, 3}


@pytest.mark.slow
def test_too_few_workers_end_the_start(caplog):
    torchrun = {"min_workers": 2, "start_timeout_s": 0.5}
    with ranks(4, tiny_job(), torchrun, protocol="bsp", stop="updates=3") as job:
        job.start(1)
        job.started(1)
        with pytest.raises(pl.RunError, match=r"worker 1, 2 did not join within start_timeout_s=0.5"):
            job.serve()


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["all_reduce", "local_sgd(H=2)"])
def test_ranks_beyond_the_first_ones_join_a_group(protocol):
    def are_four(seen):
        return sorted(seen.joined) == [2, 3] and min(seen.used_since[each] for each in range(4)) >= 2

    starting = Starting(2, 3)
    settings = {"protocol": protocol, "stop": FOREVER, "callbacks": [starting, EndWhen(are_four)]}
    with ranks(2, tiny_job(), OPEN, **settings) as job:
        starting.job = job
        job.start(1)
        ends = [job.serve(), *(job.end(rank) for rank in (1, 2, 3))]
    for end in ends:
        assert torch.equal(flat(end.parameters), flat(ends[0].parameters))


class Killing(pl.callbacks.Callback):
    """Callback that kills a rank after some gradients of a worker have been used."""

    def __init__(self, rank, worker, gradients):
        self.job = None
        self._rank = rank
        self._worker = worker
        self._left = gradients

    def on_record(self, record):
        super().on_record(record)
        if isinstance(record, GradientArrived) and record.used and record.worker == self._worker:
            self._left -= 1
            if self._left == 0:
                self.job.processes[self._rank].kill()


@pytest.mark.slow
def test_a_host_beyond_the_first_ones_joins_as_one_worker_and_leaves():
    """Two hosts begin; the fifth one, with ranks 8 and 9, comes later, and loses a process."""

    def is_gone_again(seen):
        return seen.joined == [4] and seen.lost.count(4) == 2 and seen.used_since[1] >= 2

    starting, killing = Starting(8, 9), Killing(rank=9, worker=4, gradients=3)
    settings = {"protocol": "bsp", "stop": FOREVER, "callbacks": [starting, killing, EndWhen(is_gone_again)]}
    with ranks(4, tiny_job(), {"workers": "node", "max_workers": 5}, nodes=2, **settings) as job:
        starting.job = killing.job = job
        job.start_workers()
        end = job.serve()
        assert {job.end(rank).reason for rank in (1, 2, 3)} == {end.reason}
        with pytest.raises(pl.RunError, match="a process of its host is gone"):
            job.end(8)
    [_, reason] = [reason for worker, reason in lost(end) if worker == 4]
    assert reason.startswith("a process of its host is gone")
    assert {update.k for update in end.of(UpdateMade)} == {2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["bsp", "dc_s3gd"])
def test_a_run_is_resumed_with_another_size(protocol, tmp_path):
    settings = {"protocol": protocol}
    first, then = (3, 4) if protocol == "bsp" else (2, 3)
    run(first, tiny_job(), OPEN, **settings, stop="updates=20", out=tmp_path / "run")
    [end, *_] = run(then, tiny_job(), OPEN, **settings, stop="updates=40", resume=tmp_path / "run")
    assert [resumed.version for resumed in end.of(RunResumed)] == [20]
    assert [update.k for update in end.of(UpdateMade)] == [2] * 20 + [3] * 20
    assert pl.replay(tmp_path / "run").is_same


def test_processes_with_another_limit_are_rejected():
    with ranks(3, tiny_job(), OPEN, protocol="bsp", stop="updates=3") as job:
        job.start(0)
        job.start(1)
        job.start(2, torchrun={"max_workers": 5})
        with pytest.raises(pl.UsageError, match="differs from rank 0: max_workers 4, now 5"):
            job.end(0)
