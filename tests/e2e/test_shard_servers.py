"""Several servers, each with a slice, in processes of their own: together they are one."""

import os
import signal
import threading
from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from arrival_replay import ArrivalReplay
from end_when import FOREVER
from paceline.coordinator.coordinator import Coordinator
from paceline.core.records import GradientArrived, StepMeasured, WorkerLost, WorkInterrupted
from paceline.engines import distributed
from paceline.engines.distributed import ParameterServerEngine
from paceline.engines.distributed.parameter_server.remote_worker import RemoteWorker
from paceline.engines.distributed.parameter_server.shard_channel import ShardChannel
from paceline.protocols.protocol import as_plan
from paceline.server.flat_buffers import FlatLayout
from paceline.server.parameter_server import ParameterServer
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model
from pausing_job import large_job, sgd_over
from ranks import ranks, run
from rounding import plain_loop_with_rounding, single_job
from tiny_counting import BATCH, counting_job, times_applied
from tiny_jobs import batch_norm_net, largest_relative_difference, tiny_job

EXACT = 1e-12


def flat(parameters):
    return torch.cat([tensor.reshape(-1).double() for tensor in parameters.values()])


@pytest.mark.processes
def test_bsp_on_three_slices_is_bsp_of_the_simulation_and_every_rank_has_its_model():
    job = tiny_job(model=batch_norm_net, clip_norm=0.5)
    ends = run(4, job, {"slices": 3}, protocol="bsp", stop="updates=20", measure_steps=True)
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
    heard = []

    class Noting(ParameterServerEngine):
        def run(self, coordinator, observe=None, first=None):
            def note(now, event, commands):
                if event is not None:
                    heard.append(event)
                observe(now, event, commands)

            return super().run(coordinator, note, first)

    monkeypatch.setattr(distributed, "ParameterServerEngine", Noting)
    return heard


def replayed(job, n, protocol, updates, events):
    """Return the parameters that one server reaches with these events."""
    model = build_model(job, 1)
    server = ParameterServer(job, model, FlatLayout(model), None)
    coordinator = Coordinator(as_plan(protocol), workers=n, stop=pl.Stop(updates=updates))
    ArrivalReplay(pl.Cluster(n), 1, Replica(job, 1, n), server, events=events).run(coordinator)
    return flat(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("slices", [2, 4])
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
def test_slices_reach_the_parameters_of_one_server_on_the_same_arrivals(protocol, changes, slices, events):
    job, n, updates = tiny_job(model=batch_norm_net, **changes), 3, 40
    [end, *_] = run(n + 1, job, {"slices": slices}, protocol=protocol, stop=f"updates={updates}")
    expected = replayed(job, n, protocol, updates, events)
    assert largest_relative_difference(flat(end.parameters), expected) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("slices", [2, 3])
def test_a_gradient_in_pieces_to_several_servers_is_that_of_its_minibatch_wherever_it_is_interrupted(slices):
    job = large_job()
    [end, *_] = run(3, job, {"slices": slices}, protocol="k_sync(k=1)", stop="updates=25")
    arrivals = [record for record in end.of(GradientArrived) if record.used]
    expected = sgd_over(arrivals, job, 2)
    assert end.of(WorkInterrupted)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in end.parameters.items())


@pytest.mark.slow
def test_slices_send_rounded_numbers_too():
    job = single_job()
    [end, *_] = run(3, job, {"wire": "bf16", "slices": 3}, protocol="bsp", stop="updates=20")
    rounded = plain_loop_with_rounding(job, seed=1, n=2)
    assert largest_relative_difference(flat(end.parameters), rounded.double()) < 1e-5


# --- faults ----------------------------------------------------------------------------------------------------------


class Halves(nn.Module):
    """Counts samples in two tensors, each of which is a slice."""

    def __init__(self, samples):
        super().__init__()
        self.halves = nn.ParameterList(torch.zeros(samples // 2, dtype=torch.float64) for _ in range(2))

    @property
    def count(self):
        return torch.cat(list(self.halves))

    def forward(self, index):
        return self.count[index]


def halves_job(samples, **settings):
    job = counting_job(samples, **settings)
    return pl.Job(
        **{**{name: getattr(job, name) for name in job.__dataclass_fields__}, "model": partial(Halves, samples)}
    )


def hang_between_parts(part, draw):
    """Let this worker hang when a part of a gradient, and nothing else of it, has been sent."""

    def send_remaining(self, done):
        if done.draw != draw or self.parameters.start == part:
            original(self, done)
        if done.draw == draw and self.parameters.start == part:
            hang()

    original = ShardChannel.send_remaining
    ShardChannel.send_remaining = send_remaining


@pytest.mark.processes
@pytest.mark.parametrize(
    ("part", "method"), [(0, "on_task_done"), pytest.param(1, "on_part_received", marks=pytest.mark.slow)]
)
def test_a_worker_that_dies_between_two_parts_of_a_gradient_is_lost_with_it(part, method, monkeypatch):
    samples, epochs = 8 * BATCH, 3
    train = halves_job(samples)

    def kill_when_a_part_has_come(self, first, second):
        whole = original(self, first, second)
        draw = first.draw if method == "on_task_done" else second
        if (self.worker, draw) == (0, 4):
            assert whole is None
            job.processes[1].kill()
        return whole

    original = getattr(RemoteWorker, method)
    monkeypatch.setattr(RemoteWorker, method, kill_when_a_part_has_come)
    with ranks(3, train, {"slices": 2}, protocol="bsp", stop=f"epochs={epochs}") as job:
        job.start_slices()
        job.start(1, prepare=partial(hang_between_parts, part, draw=4))
        job.start(2)
        end = job.serve()
    assert end.of(WorkerLost)[0].worker == 0
    assert [arrival.draw for arrival in end.of(GradientArrived) if arrival.worker == 0] == [1, 2, 3]
    model = train.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples


@pytest.mark.slow
def test_every_sample_is_applied_exactly_once_though_workers_are_killed_and_come_back():
    samples, n, epochs = 4 * BATCH * 5, 4, 3
    slow = pl.Cluster(n, timing=pl.Exponential(0.2))
    faults = [pl.Fault(worker, draw) for worker, draw in enumerate([2, 3, 4, 2])]
    settings = {"protocol": "k_async(k=2)", "stop": f"epochs={epochs}"}
    with ranks(n + 1, halves_job(samples), {"slowness": slow, "faults": faults, "slices": 2}, **settings) as job:
        job.start_all()
        for rank in (1, 4, 2, 3):
            job.processes[rank].join(60)
            job.start(rank)
            if rank == 2:  # which starts the server of its slice once more
                job.start(rank, slice=1)
        end = job.end(0)
    assert len(end.of(WorkerLost)) == n
    model = halves_job(samples).model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples


@pytest.mark.processes
def test_the_death_of_a_server_ends_the_run_of_everybody():
    with ranks(3, tiny_job(), {"slices": 2}, protocol="asp", stop=FOREVER) as job:
        job.start_all()
        job.await_training()
        job.processes["slice 1"].kill()
        for rank in range(3):
            with pytest.raises(pl.RunError, match="the server of slice 1, beside rank 1, is gone"):
                job.end(rank)


def fall_silent(how, version):
    """Let the server of this process do nothing any more when it is to make a version."""

    def apply(self, command):
        if command.version == version:
            how()
        return original(self, command)

    original = ParameterServer.apply
    ParameterServer.apply = apply


def hang():
    threading.Event().wait()


def stand_still():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "protocol"), [(stand_still, "bsp"), (hang, "asp"), (stand_still, "k_async(k=2)")])
def test_a_server_that_falls_silent_ends_the_run_of_everybody(how, protocol):
    settings = {"protocol": protocol, "stop": FOREVER, "worker_timeout_s": 1.0}
    with ranks(3, tiny_job(), {"slices": 2}, **settings) as job:
        job.start(1, slice=1, prepare=partial(fall_silent, how, version=5))
        job.start_all_but_slices()
        for rank in range(3):
            with pytest.raises(pl.RunError, match="the server of slice 1, beside rank 1, is gone: silent for 1 s"):
                job.end(rank)


@pytest.mark.slow
def test_of_servers_that_wait_for_each_other_the_one_that_is_silent_is_named():
    settings = {"protocol": "bsp", "stop": FOREVER, "worker_timeout_s": 1.0}
    with ranks(4, tiny_job(clip_norm=0.5), {"slices": 3}, **settings) as job:
        job.start(1, slice=1)
        job.start(2, slice=2, prepare=partial(fall_silent, hang, version=5))
        job.start_all_but_slices()
        with pytest.raises(pl.RunError, match="the server of slice 2, beside rank 2, is gone"):
            job.end(0)


@pytest.mark.slow
def test_a_server_that_falls_silent_at_the_end_of_the_run_is_not_waited_for():
    settings = {"protocol": "bsp", "stop": "updates=5", "worker_timeout_s": 1.0}
    with ranks(3, tiny_job(), {"slices": 2}, **settings) as job:
        job.start(1, slice=1, prepare=partial(fall_silent, hang, version=5))
        job.start_all_but_slices()
        with pytest.raises(pl.RunError, match="the server of slice 1, beside rank 1, is gone"):
            job.end(0)


@pytest.mark.slow
def test_a_server_that_is_started_twice_is_told_to_go():
    with ranks(3, tiny_job(), {"slices": 2}, protocol="asp", stop=FOREVER) as job:
        job.start_all()
        job.await_training()
        job.start(1, slice=1)
        with pytest.raises(SystemExit, match="0"):
            job.end("slice 1 again")
        os.kill(job.processes[0].pid, signal.SIGTERM)
        assert job.end(0).stopped_by == "interrupted"


@pytest.mark.slow
def test_a_server_that_fails_tells_why():
    job = tiny_job(optimizer=Failing)
    with ranks(3, job, {"slices": 2}, protocol="bsp", stop="updates=30") as started:
        started.start_all()
        with pytest.raises(pl.RunError, match="the server of slice 1 failed: RuntimeError: no more; its own log"):
            started.end(0)


class Failing(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.steps = 0

    def step(self):
        self.steps += 1
        is_slice = "SLICE" in os.environ
        if is_slice and self.steps == 5:
            raise RuntimeError("no more")
        super().step()


@pytest.mark.slow
def test_a_server_that_does_not_come_is_missed():
    with ranks(2, tiny_job(), {"slices": 2, "start_timeout_s": 2.0}, protocol="bsp", stop="updates=3") as job:
        job.start(0)
        job.start(1)
        with pytest.raises(pl.RunError, match=r"the server of slice 1 did not join within start_timeout_s=2"):
            job.end(0)


@pytest.mark.slow
def test_more_slices_than_tensors_are_refused_by_everybody():
    with ranks(6, tiny_job(), {"slices": 5}, protocol="bsp", stop="updates=3") as job:
        job.start_all()
        for name in (0, 1, "slice 1"):
            with pytest.raises(pl.UsageError, match="slices=5, but the model has 4 tensors"):
                job.end(name)


@pytest.mark.slow
def test_ranks_with_other_slices_stop_with_the_difference():
    with ranks(2, tiny_job(), protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.start(1, torchrun={"slices": 2})
        for rank in range(2):
            with pytest.raises(pl.UsageError, match=r"differs from rank 0: slices 1, now 2"):
                job.end(rank)


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_a_run_goes_on_from_its_checkpoint_with_other_slices(before, after, tmp_path):
    job = tiny_job(model=batch_norm_net, optimizer=partial(torch.optim.Adam, lr=0.01), clip_norm=0.5)
    run(4, job, {"slices": before}, protocol="bsp", stop="updates=15", out=tmp_path / "run")
    [end, *_] = run(4, job, {"slices": after}, protocol="bsp", stop="updates=40", resume=tmp_path / "run")
    simulated = pl.train(job, protocol="bsp", cluster=pl.Cluster(3), stop="updates=40", seed=1)
    assert largest_relative_difference(flat(end.parameters), flat(simulated.model.state_dict())) < 1e-9
    assert pl.replay(tmp_path / "run").is_same
