"""Local steps of workers that are all processes of a host, as threads of this process."""

import threading
from collections import Counter

import pytest
from torch.nn import functional as F

import paceline as pl
from local_steps_loop import local_steps_loop
from paceline.core.records import GradientArrived, WorkerJoined, WorkInterrupted
from paceline.engines.distributed.parameter_server.worker_process import WorkerProcess
from paceline.jobs.job import Job
from rank_threads import LIMIT_S, ranks, run
from ranks import flat, lost
from selections import parametrize_few
from tiny_counting import BATCH, counting_job, times_applied
from tiny_jobs import largest_relative_difference, parameters_of, tiny_job

EXACT = 1e-12
NODE = {"workers": "node"}


@pytest.mark.slow
@parametrize_few(("world_size", "nodes", "shards", "debug"), [(6, 2, 1, True), (4, 2, 3, False)], keep=1)
def test_local_steps_of_hosts_are_those_of_single_processes(world_size, nodes, shards, debug):
    job = tiny_job(batch_size=7, microbatches=2, clip_norm=0.5)
    settings = {"protocol": "bsp + local_steps(H=3, outer=nesterov)", "stop": "updates=8"}
    ends = run(world_size, job, {**NODE, "shards": shards, "debug": debug}, nodes=nodes, **settings)
    simulated = pl.train(job, cluster=pl.Cluster(nodes), seed=1, **settings)
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(simulated.model.state_dict())) < EXACT
        assert end.reason == "8 updates made"


@pytest.mark.slow
def test_the_steps_that_fit_into_a_time_are_those_of_a_plain_loop():
    job = tiny_job(sampling="epoch")
    torchrun = {**NODE, "slowness": pl.Cluster(1, timing=pl.timing.Deterministic(0.3))}
    rules = {"protocol": "bsp + local_steps(seconds=2)", "stop": "updates=4"}  # a busy machine makes two steps too
    [end, *_] = run(3, job, torchrun, **rules)
    steps = [each.minibatches for each in end.of(GradientArrived)]
    assert 1 < max(steps) <= 6  # of 0.3 s and more
    # One worker whose state is kept makes the steps of synchronous training.
    alone = pl.train(job, protocol="bsp", cluster=pl.Cluster(1), stop=pl.Stop(updates=sum(steps)), seed=1)
    assert largest_relative_difference(flat(end.parameters), flat(alone.model.state_dict())) < EXACT


class InterruptedSteps(pl.callbacks.Callback):
    """Step and callback: worker 1 is interrupted in its second local step, and makes update 2.

    Worker 0 waits until the leader of worker 1 is in that step, which then waits for update 1.

    Attributes:
        calls: microbatches that each rank has computed.
        is_cancelled: set when the leader of worker 1 knows that its work is cancelled.
    """

    def __init__(self):
        self.calls = Counter()
        self.is_cancelled = threading.Event()
        self._is_in_second_step = threading.Event()
        self._updates = [threading.Event() for _ in range(2)]

    def on_update(self, update):
        self._updates[update.version - 1].set()

    def __call__(self, model, batch):
        rank = threading.current_thread().name
        self.calls[rank] += 1
        match rank, self.calls[rank]:
            case "rank 2", 1:
                assert self._is_in_second_step.wait(LIMIT_S)
            case "rank 3", 6:
                self._is_in_second_step.set()
                assert self._updates[0].wait(LIMIT_S)
                assert self.is_cancelled.wait(LIMIT_S)
            case "rank 2", 13:
                assert self._updates[1].wait(LIMIT_S)
        return F.cross_entropy(model(batch[0]), batch[1])


def test_an_interrupt_ends_a_local_step_of_all_processes_and_changes_nothing(monkeypatch):
    script, cancel = InterruptedSteps(), WorkerProcess._cancel

    def record(process, draw):
        cancel(process, draw)
        if process._worker == 1:
            script.is_cancelled.set()

    monkeypatch.setattr(WorkerProcess, "_cancel", record)
    job = tiny_job(loss=None, step=script.__call__, microbatches=4, batch_size=12)
    rules = {"protocol": "k_sync(k=1) + local_steps(H=3)", "stop": "updates=2", "callbacks": [script]}
    [end, *_] = run(6, job, NODE, nodes=2, **rules)
    assert (1, 1) in {(each.worker, each.draw) for each in end.of(WorkInterrupted)}
    assert [(each.worker, each.draw) for each in end.of(GradientArrived) if each.used] == [(0, 1), (1, 2)]
    assert {script.calls[rank] for rank in ("rank 3", "rank 4", "rank 5")} == {6 + 3 * 4}
    check_against_plain_loop(end, tiny_job(batch_size=12), steps=3, n=2, outer_lr=1.0)


@pytest.mark.slow
def test_local_steps_that_were_not_accepted_change_nothing():
    torchrun = {
        **NODE,
        "slowness": pl.Cluster(3, timing=pl.timing.Deterministic(0.002), speed=[1.0, 1.0, 0.2]),
        "faults": [pl.Fault(worker=0, draw=3, kind="not_finite")],
    }
    rules = {"protocol": "ringmaster(r=1) + local_steps(H=2, outer='sgd(lr=0.4)')", "stop": "updates=30"}
    [end, *_] = run(9, tiny_job(), torchrun, nodes=3, **rules)
    assert {"too stale", "not finite"} <= {each.reason for each in end.of(GradientArrived)}
    check_against_plain_loop(end, tiny_job(), steps=2, n=3, outer_lr=0.4)


def check_against_plain_loop(end, job, **settings):
    arrivals = [(each.worker, each.draw, each.version) for each in end.of(GradientArrived) if each.used]
    model = job.model()
    model.load_state_dict(end.parameters)
    expected = local_steps_loop(job, 1, arrivals, **settings)
    assert largest_relative_difference(parameters_of(model), expected) < EXACT


@pytest.mark.slow
def test_a_leader_killed_between_local_steps_comes_back_with_its_group_and_every_sample_is_used_once_an_epoch():
    epochs, samples = 6, 21 * BATCH  # so that every work has three steps
    # The rate of a single gradient, which subtracts 1 from the parameter of each of its samples.
    job = Job(**{**vars(counting_job(samples)), "lr_rule": "constant", "lr_is": "total"})
    # The other worker dies too, so that the run waits for this one.
    torchrun = {**NODE, "faults": [pl.Fault(worker=1, draw=3, step=2), pl.Fault(worker=0, draw=6, step=3)]}
    rules = {"protocol": "asp + local_steps(H=3)", "stop": f"epochs={epochs}"}
    with ranks(6, job, torchrun, nodes=2, **rules) as started:
        started.start_all()
        for rank in (1, 3):
            started.join(rank)
            assert started.end(rank) is None
        for rank in (2, 4, 5):
            with pytest.raises(pl.RunError, match=r"first process of worker [01] is gone"):
                started.end(rank)
        for rank in (3, 4, 5):
            started.start(rank, torchrun={"faults": ()})
        end = started.end(0)
        assert started.faults("die") == 2
    assert sorted(worker for worker, _ in lost(end)) == [0, 1]
    assert [record.worker for record in end.of(WorkerJoined)] == [1]
    model = job.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples
