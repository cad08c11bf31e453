"""Several servers, each with a shard, in processes of their own: together they are one."""

import os
import signal
import threading
from functools import partial

import pytest
import torch

import paceline as pl
from arrival_replay import arrival_replay, noted_events
from end_when import FOREVER
from paceline.coordinator.coordinator import Coordinator
from paceline.core.records import GradientArrived, StepMeasured, WorkInterrupted
from paceline.protocols.protocol import as_plan
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model
from pausing_job import large_job, sgd_over
from ranks import ranks, run
from rounding import plain_loop_with_rounding, single_job
from tiny_jobs import batch_norm_net, largest_relative_difference, tiny_job

EXACT = 1e-12


def flat(parameters):
    return torch.cat([tensor.reshape(-1).double() for tensor in parameters.values()])


@pytest.mark.slow
def test_bsp_on_three_shards_is_bsp_of_the_simulation_and_every_rank_has_its_model():
    job = tiny_job(model=batch_norm_net, clip_norm=0.5)
    ends = run(4, job, {"shards": 3}, protocol="bsp", stop="updates=20", measure_steps=True)
    simulated = pl.train(job, protocol="bsp", cluster=pl.Cluster(3), stop="updates=20", seed=1, measure_steps=True)
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(simulated.model.state_dict())) < EXACT
    ours, theirs = ends[0].of(StepMeasured), list(simulated.history.of(StepMeasured))
    assert [each.squared_step for each in ours] == pytest.approx([each.squared_step for each in theirs], rel=1e-9)
    assert [len(end.records) > 20 for end in ends] == [True, False, False, False]


# --- the same arrivals -----------------------------------------------------------------------------------------------


@pytest.fixture
def events(monkeypatch):
    """Return the events of the run whose rank 0 is this process."""
    return noted_events(monkeypatch)


def replayed(job, n, protocol, updates, events):
    """Return the parameters that one server reaches with these events."""
    model = build_model(job, 1)
    server = ParameterServer(job, model, FlatLayout(model), None)
    coordinator = Coordinator(as_plan(protocol), workers=n, stop=pl.Stop(updates=updates))
    arrival_replay(pl.Cluster(n), Replica(job, 1, n), server, events).run(coordinator)
    return flat(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize(
    ("protocol", "changes"),
    [
        (pl.k_sync(k=2), {"clip_norm": 0.3}),
        (pl.asp(), {"clip_norm": 0.3}),
        (pl.asp() + pl.staleness_lr(C=0.01) + pl.dc_s3gd(), {}),
        (pl.k_async(k=2) + pl.dc_asgd(lambda0=2, m=0.95), {"optimizer": partial(torch.optim.Adam, lr=0.01)}),
        (pl.dbw(), {}),
        (pl.bsp().until(updates=20) >> (pl.asp() + pl.momentum("zero") + pl.staleness_weight()), {}),
    ],
    ids=str,
)
def test_shards_reach_the_parameters_of_one_server_on_the_same_arrivals(protocol, changes, shards, events):
    job, n, updates = tiny_job(model=batch_norm_net, **changes), 3, 40
    [end, *_] = run(n + 1, job, {"shards": shards}, protocol=protocol, stop=f"updates={updates}")
    expected = replayed(job, n, protocol, updates, events)
    # The replay adds in the order of arrival. Adam amplifies the rounding where a second moment is small.
    exact = EXACT if "optimizer" not in changes else 100 * EXACT
    assert largest_relative_difference(flat(end.parameters), expected) < exact


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 3])
def test_a_gradient_in_pieces_to_several_servers_is_that_of_its_minibatch_wherever_it_is_interrupted(shards):
    job = large_job()
    [end, *_] = run(3, job, {"shards": shards}, protocol="k_sync(k=1)", stop="updates=25")
    arrivals = [record for record in end.of(GradientArrived) if record.used]
    expected = sgd_over(arrivals, job, 2)
    assert end.of(WorkInterrupted)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in end.parameters.items())


@pytest.mark.slow
def test_shards_send_rounded_numbers_too():
    job = single_job()
    [end, *_] = run(3, job, {"wire": "bf16", "shards": 3}, protocol="bsp", stop="updates=20")
    rounded = plain_loop_with_rounding(job, seed=1, n=2)
    assert largest_relative_difference(flat(end.parameters), rounded.double()) < 1e-5


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_death_of_a_server_ends_the_run_of_everybody():
    with ranks(3, tiny_job(), {"shards": 2}, protocol="asp", stop=FOREVER) as job:
        job.start_all()
        job.await_training()
        job.processes["shard 1"].kill()
        for rank in range(3):
            with pytest.raises(pl.RunError, match="the server of shard 1, beside rank 1, is gone"):
                job.end(rank)


def fall_silent(how, version):
    """Let the server of this process do nothing any more when it is to make a version."""

    def apply(self, command, *arguments):
        if command.version == version:
            how()
        return original(self, command, *arguments)

    original = ParameterServer.apply
    ParameterServer.apply = apply


def hang():
    threading.Event().wait()


def stand_still():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "protocol"), [(stand_still, "bsp"), (hang, "asp"), (stand_still, "k_async(k=2)")])
def test_a_server_that_falls_silent_ends_the_run_of_everybody(how, protocol):
    settings = {"protocol": protocol, "stop": FOREVER}
    with ranks(3, tiny_job(), {"shards": 2, "heartbeat_timeout_s": 1.0}, **settings) as job:
        job.start(1, shard=1, prepare=partial(fall_silent, how, version=5))
        job.start_all_but_shards()
        for rank in range(3):
            with pytest.raises(pl.RunError, match="the server of shard 1, beside rank 1, is gone: silent for 1 s"):
                job.end(rank)


@pytest.mark.slow
def test_of_servers_that_wait_for_each_other_the_one_that_is_silent_is_named():
    settings = {"protocol": "bsp", "stop": FOREVER}
    with ranks(4, tiny_job(clip_norm=0.5), {"shards": 3, "heartbeat_timeout_s": 1.0}, **settings) as job:
        job.start(1, shard=1)
        job.start(2, shard=2, prepare=partial(fall_silent, hang, version=5))
        job.start_all_but_shards()
        with pytest.raises(pl.RunError, match="the server of shard 2, beside rank 2, is gone"):
            job.end(0)


@pytest.mark.slow
def test_a_server_that_falls_silent_at_the_end_of_the_run_is_not_waited_for():
    settings = {"protocol": "bsp", "stop": "updates=5"}
    with ranks(3, tiny_job(), {"shards": 2, "heartbeat_timeout_s": 1.0}, **settings) as job:
        job.start(1, shard=1, prepare=partial(fall_silent, hang, version=5))
        job.start_all_but_shards()
        with pytest.raises(pl.RunError, match="the server of shard 1, beside rank 1, is gone"):
            job.end(0)


@pytest.mark.slow
def test_a_server_that_is_started_twice_is_told_to_go():
    with ranks(3, tiny_job(), {"shards": 2}, protocol="asp", stop=FOREVER) as job:
        job.start_all()
        job.await_training()
        job.start(1, shard=1)
        with pytest.raises(SystemExit, match="0"):
            job.end("shard 1 again")
        os.kill(job.processes[0].pid, signal.SIGTERM)
        assert job.end(0).stopped_by == "interrupted"


@pytest.mark.slow
def test_a_server_that_fails_tells_why():
    job = tiny_job(optimizer=Failing)
    with ranks(3, job, {"shards": 2}, protocol="bsp", stop="updates=30") as started:
        started.start_all()
        with pytest.raises(pl.RunError, match="the server of shard 1 failed: RuntimeError: no more; its own log"):
            started.end(0)


class Failing(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.steps = 0

    def step(self):
        self.steps += 1
        is_shard = "SHARD" in os.environ
        if is_shard and self.steps == 5:
            raise RuntimeError("no more")
        super().step()


# --- going on --------------------------------------------------------------------------------------------------------
