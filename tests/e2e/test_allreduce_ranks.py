"""Real ranks without a server: that they do what the simulation does, and what becomes of them when some are gone."""

import os
import signal
import time

import pytest
import torch
from torch import nn

import paceline as pl
import restarted_ranks
from end_when import EndWhen
from machine_speed import scaled
from paceline.core.records import GradientArrived, RunResumed, UpdateMade, VersionEvaluated, WorkerJoined, WorkerLost
from paceline.recording.run_folder import CHECKPOINTS, SavedRun
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from ranks import ranks, run
from this_process import what_is_open
from tiny_jobs import batch_norm_net, dataset, largest_relative_difference, parameters_of, sgd, tiny_job
from torchrun import torchrun

EXACT = 1e-12
PROTOCOLS = ["all_reduce", "s3gd", "dc_s3gd", "local_sgd(H=4)"]


def flat(parameters):
    return torch.cat([tensor.reshape(-1).double() for tensor in parameters.values()])


def of(records, kind):
    return [record for record in records if isinstance(record, kind)]


def decided(records):
    arrivals = [(each.worker, each.draw, each.version, each.used) for each in of(records, GradientArrived)]
    return arrivals, [(each.version, each.k, each.samples, each.reason) for each in of(records, UpdateMade)]


def assert_does_what_the_simulation_does(n, job, faults=(), **settings):
    ends = run(n, job, {"faults": faults}, **settings)
    simulated = pl.train(job, cluster=pl.Cluster(n, faults=faults), seed=1, **settings)
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(simulated.model.state_dict())) < EXACT
        assert end.reason == simulated.reason
    assert decided(ends[0].records) == decided(simulated.history.records)
    measured = [[each.metrics for each in of(told, VersionEvaluated)] for told in (ends[0].records, simulated.history)]
    assert [each["loss"] for each in measured[0]] == pytest.approx([each["loss"] for each in measured[1]], rel=EXACT)
    return ends[0]


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.7)


def mean_loss(updates):
    return sum(update.loss for update in updates) / len(updates)


def uneven_epochs(**changes):
    """A job of nine minibatches an epoch, so that four workers do not end it together."""
    return tiny_job(model=batch_norm_net, batch_size=10, sampling="epoch", **changes)


def big_net():
    """8 MB that are summed, of which little is computed with."""
    return nn.Sequential(nn.Linear(5, 3), Idle())


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2_000_000))

    def forward(self, inputs):
        return inputs + self.bias[:3]


@pytest.mark.slow
def test_ranks_do_what_the_simulation_does():
    settings = {"protocol": "dc_s3gd", "stop": "epochs=5", "evaluate_every": "updates=4"}
    faults = [pl.Fault(worker=1, draw=5, kind="not_finite")]
    job = uneven_epochs(eval_data=dataset(20), scheduler=halving, schedule_unit="gradient")
    end = assert_does_what_the_simulation_does(4, job, faults, **settings)
    assert [record.worker for record in of(end.records, GradientArrived) if not record.used] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["all_reduce", "dc_s3gd"])
def test_partitioned_data_and_steps_that_are_measured(protocol):
    job = tiny_job(sampling="epoch", sharding="partitioned", batch_size=7)
    measures = protocol == "all_reduce"
    assert_does_what_the_simulation_does(3, job, protocol=protocol, stop="epochs=6", measure_steps=measures)


@pytest.mark.slow
def test_a_killed_rank_is_named_by_all_others_at_once():
    slow = pl.Cluster(3, timing=pl.timing.Deterministic(0.05))
    torchrun = {"faults": [pl.Fault(worker=2, draw=9)], "slowness": slow}
    with ranks(3, tiny_job(), torchrun, protocol="dc_s3gd", stop="updates=3000") as job:
        job.start_all()
        job.processes[2].join(scaled(60))
        begun_s = time.monotonic()
        for rank, said in ((0, ""), (1, "rank 0: ")):
            with pytest.raises(pl.RunError, match=rf"{said}a worker is gone: worker 2 \(.*, process \d+\): .*min_w"):
                job.end(rank)
        assert time.monotonic() - begun_s < 5.0


@pytest.mark.slow
@pytest.mark.processes
def test_those_who_are_left_go_on_and_one_that_comes_later_takes_part():
    slow = pl.Cluster(3, timing=pl.timing.Deterministic(0.02))
    torchrun = {"faults": [pl.Fault(worker=2, draw=9)], "slowness": slow, "min_workers": 1}
    is_back = EndWhen(_has_come_back_and_done_its_share)
    with ranks(3, tiny_job(), torchrun, protocol="dc_s3gd", stop="seconds=40", callbacks=[is_back]) as job:
        job.start_all()
        job.processes[2].join(scaled(60))
        job.start(2, torchrun={"faults": []})
        ends = [job.end(rank) for rank in range(3)]
    [lost], [joined] = of(ends[0].records, WorkerLost), of(ends[0].records, WorkerJoined)
    assert (lost.worker, joined.worker) == (2, 2)
    updates = of(ends[0].records, UpdateMade)
    assert ends[0].stopped_by == "interrupted"  # because it was back
    assert [update.version for update in updates] == list(range(1, len(updates) + 1))
    assert {update.k for update in updates if lost.now_s < update.now_s < joined.now_s} == {2}
    assert {update.k for update in updates if update.now_s > joined.now_s + 0.1} == {3}
    assert all(gradient.used for gradient in of(ends[0].records, GradientArrived))
    assert mean_loss(updates[-20:]) < mean_loss(updates[:20]) - 0.02
    for end in ends:
        assert torch.equal(flat(end.parameters), flat(ends[0].parameters))


def _has_come_back_and_done_its_share(seen):
    return seen.joined == [2] and seen.used_since[2] >= 20 and seen.updates >= 120


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["all_reduce", "dc_s3gd", "local_sgd(H=4)"])
def test_a_trace_of_ranks_replays_as_long_as_they_took(protocol):
    slowness = pl.Cluster(2, timing=pl.timing.Exponential(0.03))
    [end, _] = run(2, tiny_job(), {"slowness": slowness}, protocol=protocol, stop="updates=30")
    trace = pl.timing.Trace.of(end.records)
    assert not trace.has_server
    took_s = of(end.records, UpdateMade)[-1].now_s
    assert pl.simulate(protocol, pl.Cluster(2, trace), updates=30).time_s == pytest.approx(took_s, rel=0.2)


@pytest.mark.slow
def test_those_who_are_left_keep_their_own_momentum_and_repeat_the_iteration():
    job, n, updates, gone = tiny_job(optimizer=sgd(0.05, 0.9)), 3, 16, pl.Fault(worker=2, draw=9)
    torchrun = {"faults": [gone], "min_workers": 1, "slowness": pl.Cluster(n, timing=pl.timing.Deterministic(0.05))}
    ends = run(n, job, torchrun, protocol="local_sgd(H=1)", stop=f"updates={updates}")
    loader, model = MinibatchLoader(job, 1, n), build_model(job, 1)
    velocity = [torch.zeros_like(parameters_of(model))] * n
    for draw in range(1, updates + 1):
        workers = range(n if draw < gone.draw else n - 1)
        for worker in workers:
            inputs, target = loader.batch(worker, draw, None)
            gradient = torch.autograd.grad(job.loss(model(inputs), target), model.parameters())
            for _ in range(2 if draw == gone.draw else 1):
                velocity[worker] = 0.9 * velocity[worker] + nn.utils.parameters_to_vector(gradient)
        average = parameters_of(model) - 0.05 * sum(velocity[worker] for worker in workers) / len(workers)
        nn.utils.vector_to_parameters(average, model.parameters())
    assert [update.k for update in of(ends[0].records, UpdateMade)] == [3] * 8 + [2] * 8
    assert largest_relative_difference(flat(ends[0].parameters), average) < EXACT


@pytest.mark.slow
def test_a_rank_alone_is_left():
    torchrun = {"faults": [pl.Fault(worker=1, draw=9)], "min_workers": 1}
    end = run(2, tiny_job(), torchrun, protocol="dc_s3gd", stop="updates=30")[0]
    assert [update.k for update in of(end.records, UpdateMade)][-1] == 1


@pytest.mark.slow
def test_a_rank_whose_gradients_are_never_finite_is_named():
    faults = [pl.Fault(worker=1, draw=draw, kind="not_finite") for draw in range(5, 20)]
    ends = run(2, tiny_job(), {"faults": faults}, protocol="dc_s3gd", stop="updates=50")
    for end in ends:
        assert end.stopped_by == "not_finite"
        assert "10 gradients in a row of worker 1 were not finite" in end.reason


def test_local_sgd_is_saved_at_the_first_sum_when_it_is_time(tmp_path):
    settings = {"protocol": "local_sgd(H=4)", "stop": "updates=14", "out": tmp_path / "run"}
    run(1, tiny_job(), **settings, checkpoint_every="updates=5", keep_checkpoints=100)
    saved = [path.name.rpartition("-")[2] for path in (tmp_path / "run" / CHECKPOINTS).iterdir() if path.is_dir()]
    assert sorted(map(int, saved)) == [0, 4, 8, 12, 14]  # at 5 and 10 it was time


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("protocol", ["dc_s3gd", "local_sgd(H=4)"])
def test_a_signal_ends_all_alike_with_a_checkpoint(rank, protocol, tmp_path):
    slow = pl.Cluster(3, timing=pl.timing.Deterministic(0.05))
    settings = {"protocol": protocol, "stop": "updates=3000", "out": tmp_path / "run"}
    with ranks(3, tiny_job(), {"slowness": slow}, **settings) as job:
        job.start_all()
        job.await_training()
        os.kill(job.processes[rank].pid, signal.SIGTERM)
        ends = [job.end(rank) for rank in range(3)]
    for end in ends:
        assert end.reason == f"interrupted by SIGTERM{f' at worker {rank}' if rank else ''}"
        assert torch.equal(flat(end.parameters), flat(ends[0].parameters))
    made = of(ends[0].records, UpdateMade)[-1].version
    del settings["out"]
    settings["stop"] = f"updates={made + 5}"
    ends = run(3, tiny_job(), {"slowness": slow}, **settings, resume=tmp_path / "run")
    assert [update.version for update in of(ends[0].records, UpdateMade)] == list(range(1, made + 6))
    assert [resumed.version for resumed in of(ends[0].records, RunResumed)] == [made]
    assert torch.equal(flat(ends[0].parameters), flat(ends[2].parameters))


@pytest.mark.slow
def test_an_elastic_rank_that_is_told_to_end_leaves_alone():
    slow = pl.Cluster(3, timing=pl.timing.Deterministic(0.05))
    with ranks(3, tiny_job(), {"slowness": slow, "min_workers": 1}, protocol="dc_s3gd", stop="updates=100") as job:
        job.start_all()
        job.await_training()
        begun_s = time.monotonic()
        os.kill(job.processes[2].pid, signal.SIGTERM)
        with pytest.raises(SystemExit) as left:
            job.end(2)
        assert left.value.code == 128 + signal.SIGTERM
        assert time.monotonic() - begun_s < 5.0
        end = job.end(0)
    [lost] = of(end.records, WorkerLost)
    assert (lost.worker, lost.reason[-7:]) == (2, "SIGTERM")
    assert end.stopped_by == "updates"


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True])
def test_a_rank_that_stands_still_in_the_middle_of_a_sum_counts_as_dead(elastic):
    job = tiny_job(model=big_net, data=dataset(dtype=torch.float32))
    torchrun = {"min_workers": 1 if elastic else None, "threads": 1}
    settings = {"protocol": "all_reduce", "stop": "updates=40", "worker_timeout_s": 2.0}
    with ranks(3, job, torchrun, **settings) as started:
        started.start_all()
        started.await_training()
        os.kill(started.processes[1].pid, signal.SIGSTOP)  # sums are most of the time
        if elastic:
            [lost] = of(started.end(0).records, WorkerLost)
            assert lost.worker == 1
        else:
            with pytest.raises(pl.RunError, match=r"worker 1 \("):
                started.end(2)


@pytest.mark.slow
def test_ranks_without_rank_0_end():
    slow = pl.Cluster(3, timing=pl.timing.Deterministic(0.05))
    with ranks(3, tiny_job(), {"slowness": slow}, protocol="dc_s3gd", stop="updates=3000") as job:
        job.start_all()
        job.await_training()
        job.processes[0].kill()
        begun_s = time.monotonic()
        for rank in (1, 2):
            with pytest.raises(pl.RunError, match="rank 0 is gone"):
                job.end(rank)
        assert time.monotonic() - begun_s < 5.0


@pytest.mark.slow
def test_another_world_size_needs_elastic(tmp_path):
    settings = {"protocol": "dc_s3gd", "seed": 1}
    run(3, tiny_job(), **settings, stop="updates=20", out=tmp_path / "run")
    with ranks(2, tiny_job(), **settings, stop="updates=40", resume=tmp_path / "run") as job:
        job.start_all()
        with pytest.raises(pl.UsageError, match=r"3 workers, now .*2 workers; .*max_workers"):
            job.end(0)
    run(3, tiny_job(), {"min_workers": 1}, **settings, stop="updates=20", out=tmp_path / "other")
    ends = run(2, tiny_job(), {"min_workers": 1}, **settings, stop="updates=40", resume=tmp_path / "other")
    assert [update.k for update in of(ends[0].records, UpdateMade)] == [3] * 20 + [2] * 20


def open_files():
    """Return the number of open files, but for the data of a job that worker processes share."""
    names = [name for name in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{name}")]
    return sum("/dev/shm/torch" not in os.readlink(f"/proc/self/fd/{name}") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [None, pl.Fault(worker=1, draw=3), pl.Fault(worker=1, draw=3, kind="hang")],
    ids=["healthy", "killed", "hung"],
)
def test_rank_0_leaves_nothing_behind(fault):
    settings = {"protocol": "dc_s3gd", "stop": "updates=20", "worker_timeout_s": 1.0}
    run(2, tiny_job(), **settings)  # the first one starts what is there for good
    before = what_is_open()[:2], open_files()
    with ranks(2, tiny_job(), {"faults": [fault] if fault else [], "min_workers": 1}, **settings) as job:
        job.start_workers()
        assert job.serve().stopped_by == "updates"
    del job  # with the pipes to its ranks
    assert (what_is_open()[:2], open_files()) == before


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_starts_all_ranks_again_from_the_last_checkpoint(rank, tmp_path):
    done = torchrun(tmp_path, "--nproc-per-node", 3, "--max-restarts", 1, restarted_ranks.__file__, rank, 35)
    assert done.returncode == 0, done.stderr
    saved = SavedRun(tmp_path / "run")
    [resumed] = saved.history.of(RunResumed)
    assert resumed.version == 31  # the first after 30, which the ranks need to save what only they have
    updates = [record.version for record in saved.history.of(UpdateMade)]
    assert updates == list(range(1, restarted_ranks.UPDATES + 1))
