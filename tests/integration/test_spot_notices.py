"""Spot notices while ranks train: each rank is a thread, and its notice a file."""

import signal
import threading
from collections import Counter
from dataclasses import replace

import pytest

import paceline as pl
from end_when import FOREVER, EndWhen
from metadata_server import MetadataServer
from paceline.core.records import GradientArrived, RunEnded
from paceline.engines import notice_watch
from paceline.engines.distributed.parameter_server.worker_process import WorkerProcess
from rank_threads import LIMIT_S, ranks
from ranks import lost, used_by
from selections import parametrize_few
from tiny_counting import BATCH, counting_job, tallying_job, times_applied
from tiny_jobs import tiny_job

RANK = 1  # that gets the notice


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(notice_watch, "POLL_S", 0.005)


class Noticed:
    """Job in which a rank gets its notice within a minibatch, which goes on when the rank has it.

    The other ranks wait for that within a later minibatch, so that they leave some to this one.

    Args:
        monkeypatch: fixture of pytest.
        notice: function that publishes the notice.
        minibatch: number of that minibatch in the rank, from 1.
    """

    def __init__(self, monkeypatch, notice, minibatch):
        self._notice = notice
        self._minibatch = minibatch
        self._counts = Counter()
        self._is_noticed = threading.Event()
        leave = WorkerProcess._leave

        def noticed(worker, reason):
            leave(worker, reason)
            self._is_noticed.set()

        monkeypatch.setattr(WorkerProcess, "_leave", noticed)

    def job(self, job):
        """Return the job with this notice."""

        def step(model, batch):
            name = threading.current_thread().name
            self._counts[name] += 1
            if name == f"rank {RANK}" and self._counts[name] == self._minibatch:
                self._notice()
            waits_from = self._minibatch + 2 * (name != f"rank {RANK}")
            assert self._counts[name] < waits_from or self._is_noticed.wait(LIMIT_S)
            return job.step(model, batch)

        return replace(job, step=step)


def leaving_end(job):
    """Return the result of rank 0 after a rank has left."""
    with pytest.raises(SystemExit) as left:
        job.end(RANK)
    assert left.value.code == 128 + signal.SIGTERM
    return job.end(0)


def model_of(job, end):
    model = job.model()
    model.load_state_dict(end.parameters)
    return model


@parametrize_few("protocol", ["bsp", "asp", "k_batch_async(k=3)"], keep=1)
def test_a_worker_with_a_notice_hands_in_its_gradient_and_no_sample_is_lost(protocol, monkeypatch, tmp_path):
    place, epochs, train = tmp_path / "preempt", 3, counting_job(24 * BATCH)
    noticed = Noticed(monkeypatch, place.touch, minibatch=4)
    with ranks(4, noticed.job(train), protocol=protocol, stop=f"epochs={epochs}") as job:
        job.start(0)
        job.start(RANK, torchrun={"notice": str(place)})
        job.start(2)
        job.start(3)
        end = leaving_end(job)
    assert lost(end) == [(0, f"{place} exists")]
    assert used_by(end, 0) == 4
    assert times_applied(model_of(train, end)) == [epochs] * 24 * BATCH


def test_the_notice_of_a_cloud_is_one(monkeypatch):
    with MetadataServer() as server:

        def notice():
            server.is_preempted = True

        noticed = Noticed(monkeypatch, notice, minibatch=2)
        torchrun = {"notice": f"aws@{server.address}"}
        with ranks(3, noticed.job(counting_job(8 * BATCH)), protocol="asp", stop="epochs=2") as job:
            job.start(0)
            job.start(RANK, torchrun=torchrun)
            job.start(2)
            end = leaving_end(job)
    assert lost(end) == [(0, "AWS will terminate this machine at 2017-09-18T08:22:00+00:00")]


@pytest.mark.slow
def test_local_steps_end_with_the_current_one_and_the_others_are_dealt_again(monkeypatch, tmp_path):
    place, epochs, train = tmp_path / "preempt", 2, tallying_job(48 * BATCH)
    noticed = Noticed(monkeypatch, place.touch, minibatch=8 + 3)
    with ranks(3, noticed.job(train), protocol="bsp + local_steps(H=8)", stop=f"epochs={epochs}") as job:
        job.start(0)
        job.start(RANK, torchrun={"notice": str(place)})
        job.start(2)
        end = leaving_end(job)
    arrived = [record for record in end.of(GradientArrived) if record.worker == 0]
    assert [(record.minibatches, record.used) for record in arrived] == [(8, True), (3, True)]
    assert sum(record.minibatches for record in end.of(GradientArrived) if record.used) == 48 * epochs


def has_continued(seen):
    return seen.lost and sum(seen.used_since.values()) > 3


class Publish(pl.callbacks.Callback):
    """Callback that makes a file at the third update."""

    def __init__(self, place):
        self._place = place

    def on_update(self, update):
        if update.version == 3:
            self._place.touch()


@pytest.mark.slow
def test_an_elastic_rank_without_a_server_leaves_alone(tmp_path):
    place = tmp_path / "preempt"
    callbacks = [Publish(place), EndWhen(has_continued)]
    settings = {"protocol": "all_reduce", "stop": FOREVER, "callbacks": callbacks}
    with ranks(3, tiny_job(), {"min_workers": 1}, **settings) as job:
        job.start(RANK, torchrun={"notice": str(place)})
        job.start(2)
        end = job.serve()
        with pytest.raises(SystemExit):
            job.end(RANK)
    assert [worker for worker, _ in lost(end)] == [1]


@parametrize_few("protocol", ["bsp", "all_reduce"], keep=1)
def test_a_notice_at_rank_0_ends_the_run_as_interrupted(protocol, tmp_path):
    place = tmp_path / "preempt"
    with ranks(3, tiny_job(), protocol=protocol, stop=FOREVER) as job:
        job.start(0, torchrun={"notice": str(place)})
        job.start_workers()
        job.await_training()
        place.touch()
        end = job.end(0)
    assert end.stopped_by == "interrupted"
    assert end.of(RunEnded)[0].reason == f"interrupted by {place} exists"


def test_the_notice_of_one_process_of_a_host_is_that_of_its_worker(tmp_path):
    place, follower = tmp_path / "preempt", 3
    callbacks = [Publish(place), EndWhen(has_continued)]
    settings = {"protocol": "bsp", "stop": FOREVER, "callbacks": callbacks}
    with ranks(4, tiny_job(), {"workers": "node"}, nodes=2, **settings) as job:
        job.start(1)
        job.start(2)
        job.start(follower, torchrun={"notice": str(place)})
        end = job.serve()
        for rank in (2, follower):
            with pytest.raises(SystemExit):
                job.end(rank)
    assert lost(end) == [(1, f"{place} exists")]
