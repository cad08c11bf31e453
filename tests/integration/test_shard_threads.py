"""Servers of shards, as threads: together they are one server, also when workers or servers are lost."""

import threading

import pytest
import torch

import paceline as pl
from end_when import FOREVER
from halves import halves_job
from paceline.core.records import GradientArrived, StepMeasured, WorkerLost
from paceline.engines.distributed.parameter_server.remote_worker import RemoteWorker
from paceline.engines.distributed.parameter_server.shard_channel import ShardChannel
from rank_threads import ranks, run
from ranks import flat
from selections import parametrize_few
from tiny_counting import BATCH, times_applied
from tiny_jobs import batch_norm_net, largest_relative_difference, tiny_job

EXACT = 1e-12


@pytest.mark.slow
def test_local_steps_on_shards_are_those_of_the_simulation():
    job = tiny_job(model=batch_norm_net, clip_norm=0.5)
    settings = {"protocol": "bsp + local_steps(H=3, outer=nesterov)", "stop": "updates=8"}
    ends = run(4, job, {"shards": 2}, **settings)
    simulated = pl.train(job, cluster=pl.Cluster(3), seed=1, **settings)
    assert largest_relative_difference(flat(ends[0].parameters), flat(simulated.model.state_dict())) < EXACT


@pytest.mark.parametrize("shards", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_bsp_on_shards_is_bsp_of_the_simulation_and_every_rank_has_its_model(shards):
    job = tiny_job(model=batch_norm_net, clip_norm=0.5)
    settings = {"protocol": "bsp", "stop": "updates=12", "measure_steps": True}
    ends = run(4, job, {"shards": shards}, **settings)
    simulated = pl.train(job, cluster=pl.Cluster(3), seed=1, **settings)
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(simulated.model.state_dict())) < EXACT
    ours, theirs = ends[0].of(StepMeasured), list(simulated.history.of(StepMeasured))
    assert [each.squared_step for each in ours] == pytest.approx([each.squared_step for each in theirs], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["asp", "dbw", "k_sync(k=1)", "k_batch_async(k=2) + dc_asgd(lambda0=2, m=0.95)"])
def test_protocols_run_on_shards_and_every_rank_has_the_model(protocol):
    ends = run(4, tiny_job(model=batch_norm_net), {"shards": 3}, protocol=protocol, stop="updates=20")
    assert all(torch.equal(flat(end.parameters), flat(ends[0].parameters)) for end in ends)
    assert {end.stopped_by for end in ends} == {"updates"}


@parametrize_few(("part", "method"), [(0, "on_task_done"), (1, "on_part_received")], keep=1)
def test_a_worker_that_is_killed_between_two_parts_of_a_gradient_is_lost_with_it(part, method, monkeypatch):
    """The worker sends one part of its fourth gradient, and is killed when that part has come."""
    samples, epochs = 8 * BATCH, 3
    train = halves_job(samples)
    came = []

    def send_remaining(channel, done):
        process = job.processes[1]
        if done.draw != 4 or channel not in channels(process) or channel.parameters.start == part:
            send(channel, done)
        if done.draw == 4 and channel in channels(process) and channel is channels(process)[-1]:
            process.hang()

    def channels(process):
        return used.get(process.thread.ident, [])

    def use(channel, connection):
        used.setdefault(threading.get_ident(), []).append(channel)
        original_use(channel, connection)

    def note(worker, first, second):
        whole = original(worker, first, second)
        draw = first.draw if method == "on_task_done" else second
        if (worker.worker, draw) == (0, 4):
            assert whole is None
            came.append(draw)
            job.processes[1].kill()
        return whole

    used = {}
    send, original_use, original = ShardChannel.send_remaining, ShardChannel.use, getattr(RemoteWorker, method)
    monkeypatch.setattr(ShardChannel, "send_remaining", send_remaining)
    monkeypatch.setattr(ShardChannel, "use", use)
    monkeypatch.setattr(RemoteWorker, method, note)
    sharded = {"shards": 2, "share_memory": False}
    with ranks(3, train, sharded, protocol="bsp", stop=f"epochs={epochs}") as job:
        job.start_workers()
        end = job.serve()
    assert came == [4]
    assert end.of(WorkerLost)[0].worker == 0
    assert [arrival.draw for arrival in end.of(GradientArrived) if arrival.worker == 0] == [1, 2, 3]
    model = train.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples


def test_the_loss_of_a_server_ends_the_run_of_all_ranks():
    with ranks(3, tiny_job(), {"shards": 2}, protocol="asp", stop=FOREVER) as job:
        job.start_all()
        job.await_training()
        job.processes["shard 1"].kill()
        for rank in range(3):
            with pytest.raises(pl.RunError, match="the server of shard 1, beside rank 1, is gone"):
                job.end(rank)


def test_a_server_that_is_started_twice_is_rejected():
    with ranks(3, tiny_job(), {"shards": 2}, protocol="asp", stop=FOREVER) as job:
        job.start_all()
        job.await_training()
        first = job.processes["shard 1"]
        job.start_shard(1)
        with pytest.raises(SystemExit, match="0"):
            job.end("shard 1")
        assert first.thread.is_alive()
        first.kill()


def test_a_server_that_does_not_come_is_missed():
    with ranks(2, tiny_job(), {"shards": 2, "start_timeout_s": 0.5}, protocol="bsp", stop="updates=3") as job:
        job.start(0)
        job.start(1)
        with pytest.raises(pl.RunError, match=r"the server of shard 1 did not join within start_timeout_s=0.5"):
            job.end(0)


def test_more_shards_than_tensors_are_rejected_by_all_ranks():
    with ranks(6, tiny_job(), {"shards": 5}, protocol="bsp", stop="updates=3") as job:
        job.start_all()
        for name in (0, 1, "shard 1"):
            with pytest.raises(pl.UsageError, match="shards=5, but the model has 4 tensors"):
                job.end(name)


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(2, 3, marks=pytest.mark.slow), (3, 1), pytest.param(1, 2, marks=pytest.mark.slow)],
)
def test_a_run_goes_on_from_its_checkpoint_with_other_shards(before, after, tmp_path):
    job = tiny_job(model=batch_norm_net, clip_norm=0.5)
    run(4, job, {"shards": before}, protocol="bsp", stop="updates=6", out=tmp_path / "run")
    [end, *_] = run(4, job, {"shards": after}, protocol="bsp", stop="updates=12", resume=tmp_path / "run")
    simulated = pl.train(job, protocol="bsp", cluster=pl.Cluster(3), stop="updates=12", seed=1)
    assert largest_relative_difference(flat(end.parameters), flat(simulated.model.state_dict())) < 1e-9
    assert pl.replay(tmp_path / "run").is_same
