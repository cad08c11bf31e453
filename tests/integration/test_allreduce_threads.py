"""Ranks without a server, as threads: the simulation's parameters, and faults scripted by (worker, draw)."""

import pytest
import torch

import paceline as pl
from end_when import EndWhen
from paceline.core.records import (
    GradientArrived,
    RunResumed,
    UpdateMade,
    VersionEvaluated,
    WorkerJoined,
    WorkerLost,
)
from paceline.engines.distributed.rendezvous import first_workers
from rank_threads import ranks, run
from ranks import flat
from selections import each_value_once, parametrize_few
from tiny_jobs import batch_norm_net, dataset, largest_relative_difference, tiny_job

EXACT = 1e-12
PROTOCOLS = [
    "all_reduce",
    "s3gd",
    "dc_s3gd",
    "dc_s3gd(lag=2)",
    "s3gd(lag=4)",
    "local_sgd(H=4)",
    "local_sgd(H=4, lag=1)",
    "local_sgd(H=4, lag=4, outer=nesterov)",
    "local_sgd(H=4, fragments=2)",
    "local_sgd(H=4, fragments=2, lag=3, outer=nesterov)",
    "local_sgd(H=4, outer=nesterov)",
]


def decided(records):
    arrivals = [(each.worker, each.draw, each.version, each.used) for each in records if type(each) is GradientArrived]
    updates = [(each.version, each.k, each.samples, each.reason) for each in records if type(each) is UpdateMade]
    return arrivals, updates


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.7)


def uneven_epochs(**changes):
    """Return a job of nine minibatches an epoch, so that four workers do not end it together."""
    return tiny_job(model=batch_norm_net, batch_size=10, sampling="epoch", **changes)


@parametrize_few(
    ("protocol", "case"), each_value_once(PROTOCOLS, [(4, "epochs=3"), (1, "updates=15"), (2, "updates=15")]), keep=1
)
def test_every_algorithm_does_what_its_simulation_does(protocol, case):
    n, stop = case
    job = uneven_epochs(eval_data=dataset(20), scheduler=halving, schedule_unit="gradient")
    settings = {"protocol": protocol, "stop": stop, "evaluate_every": "updates=7"}
    faults = [pl.Fault(worker=n - 1, draw=9 if n < 4 else 5, kind="not_finite")]
    ends = run(n, job, {"faults": faults}, **settings)
    simulated = pl.train(job, cluster=pl.Cluster(n, faults=faults), seed=1, **settings)
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(simulated.model.state_dict())) < EXACT
        assert end.reason == simulated.reason
    assert decided(ends[0].records) == decided(simulated.history.records)
    assert [each.worker for each in ends[0].of(GradientArrived) if not each.used] == [n - 1]
    measured = [[each.metrics["loss"] for each in ends[0].of(VersionEvaluated)]]
    measured.append([each.metrics["loss"] for each in simulated.history.of(VersionEvaluated)])
    assert measured[0] == pytest.approx(measured[1], rel=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "protocol",
    [
        "dc_s3gd",
        "dc_s3gd(lag=3)",
        "local_sgd(H=3)",
        "local_sgd(H=3, lag=2)",
        "local_sgd(H=4, fragments=2)",
    ],
)
def test_an_iteration_without_a_finite_gradient_is_repeated_as_in_the_simulation(protocol):
    faults = [pl.Fault(worker=worker, draw=6, kind="not_finite") for worker in range(2)]
    settings = {"protocol": protocol, "stop": "updates=14"}
    ends = run(2, tiny_job(), {"faults": faults}, **settings)
    simulated = pl.train(tiny_job(), cluster=pl.Cluster(2, faults=faults), seed=1, **settings)
    assert [each.draw for each in ends[0].of(GradientArrived) if not each.used] == [6, 6]
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(simulated.model.state_dict())) < EXACT


def test_a_killed_rank_is_named_by_all_others():
    with ranks(3, tiny_job(), {"faults": [pl.Fault(worker=2, draw=9)]}, protocol="dc_s3gd", stop="updates=3000") as job:
        job.start_all()
        for rank, said in ((0, ""), (1, "rank 0: ")):
            with pytest.raises(pl.RunError, match=rf"{said}a worker is gone: worker 2 \(.*, process \d+\): .*min_w"):
                job.end(rank)
        assert job.faults("die") == 1


@parametrize_few(
    "protocol",
    [
        "all_reduce",
        "dc_s3gd(lag=2)",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("s3gd", "dc_s3gd", "local_sgd(H=4)")),
    ],
    keep=1,
)
def test_the_ranks_that_are_left_go_on(protocol, caplog):
    torchrun = {"faults": [pl.Fault(worker=3, draw=9), pl.Fault(worker=1, draw=14, kind="raise")], "min_workers": 1}
    with ranks(4, uneven_epochs(eval_data=dataset(20)), torchrun, protocol=protocol, stop="epochs=7") as job:
        job.start_all()
        ends = {rank: job.end(rank) for rank in (0, 2)}
        with pytest.raises(RuntimeError, match="scripted fault at draw 14"):
            job.end(1)
        assert job.faults("die") == 1
    assert "worker 1 failed: RuntimeError: scripted fault at draw 14" in caplog.text
    assert [each.worker for each in ends[0].of(WorkerLost)] == [3, 1]
    assert len([each for each in ends[0].of(GradientArrived) if each.used]) == 7 * 9  # each minibatch once an epoch
    assert torch.equal(flat(ends[0].parameters), flat(ends[2].parameters))


@pytest.mark.slow
def test_a_rank_that_comes_later_takes_part():
    def has_come_back(seen):
        return seen.joined == [2] and seen.used_since[2] >= 10

    torchrun = {"faults": [pl.Fault(worker=2, draw=9)], "min_workers": 1}
    settings = {"protocol": "dc_s3gd", "stop": "seconds=40", "callbacks": [EndWhen(has_come_back)]}
    with ranks(3, tiny_job(), torchrun, **settings) as job:
        job.start_workers()
        job.when_ended(2, lambda: job.start(2, torchrun={"faults": []}))
        ends = [job.serve(), job.end(1), job.end(2)]
    [lost], [joined] = ends[0].of(WorkerLost), ends[0].of(WorkerJoined)
    assert (lost.worker, joined.worker) == (2, 2)
    updates = ends[0].of(UpdateMade)
    assert ends[0].stopped_by == "interrupted"
    assert [update.version for update in updates] == list(range(1, len(updates) + 1))
    assert {update.k for update in updates if lost.now_s < update.now_s < joined.now_s} <= {2}
    assert updates[-1].k == 3
    for end in ends:
        assert torch.equal(flat(end.parameters), flat(ends[0].parameters))


@parametrize_few("elastic", [False, True], keep=1)
def test_a_rank_that_hangs_counts_as_lost(elastic):
    torchrun = {"faults": [pl.Fault(worker=1, draw=9, kind="hang")], "min_workers": 1 if elastic else None}
    settings = {"protocol": "all_reduce", "stop": "updates=30", "worker_timeout_s": 0.3}
    with ranks(3, tiny_job(), torchrun, **settings) as job:
        job.start_all()
        if elastic:
            [lost] = job.end(0).of(WorkerLost)
            assert (lost.worker, lost.reason[-16:]) == (1, "silent for 0.3 s")
        else:
            with pytest.raises(pl.RunError, match=r"worker 1 \(.*silent for 0.3 s"):
                job.end(2)
        assert job.faults("hang") == 1


def test_ranks_without_rank_0_end():
    slow = pl.Cluster(3, timing=pl.timing.Deterministic(0.01))
    with ranks(3, tiny_job(), {"slowness": slow}, protocol="dc_s3gd", stop="updates=3000") as job:
        job.start_all()
        job.await_training()
        job.processes[0].kill()
        for rank in (1, 2):
            # Here rank 0 is a thread, which may still report the other rank as lost while it is killed.
            with pytest.raises(pl.RunError, match=r"rank 0 is gone|a worker is gone"):
                job.end(rank)


@pytest.mark.parametrize("elastic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_decisions_can_be_replayed(elastic, tmp_path):
    faults = [pl.Fault(worker=1, draw=9), pl.Fault(worker=2, draw=5, kind="not_finite")] if elastic else []
    settings = {"protocol": "dc_s3gd", "stop": "epochs=7", "out": tmp_path / "run"}
    torchrun = {"faults": faults, "min_workers": 1 if elastic else None}
    with ranks(3, uneven_epochs(eval_data=dataset(20)), torchrun, **settings) as job:
        job.start_workers()
        job.serve()
        assert job.faults("die") == elastic
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.slow
def test_a_run_is_resumed_with_fewer_ranks_if_it_is_elastic(tmp_path):
    settings = {"protocol": "dc_s3gd"}
    run(3, tiny_job(), {"min_workers": 1}, **settings, stop="updates=20", out=tmp_path / "run")
    ends = run(2, tiny_job(), {"min_workers": 1}, **settings, stop="updates=40", resume=tmp_path / "run")
    assert [resumed.version for resumed in ends[0].of(RunResumed)] == [20]
    assert [update.k for update in ends[0].of(UpdateMade)] == [3] * 20 + [2] * 20
    assert torch.equal(flat(ends[0].parameters), flat(ends[1].parameters))


def test_ranks_that_do_not_agree():
    with ranks(2, tiny_job(), protocol="dc_s3gd", stop="updates=5") as job:
        job.start(0)
        job.start(1, protocol="dc_s3gd(lambda0=0.3)")
        for rank in range(2):
            with pytest.raises(pl.UsageError, match=r"differs from rank 0: protocol"):
                job.end(rank)


def test_a_rank_that_does_not_come_is_named(caplog, monkeypatch):
    monkeypatch.setattr(first_workers, "NOTICE_S", 0.1)
    with ranks(3, tiny_job(), {"start_timeout_s": 0.3}, protocol="dc_s3gd", stop="updates=5") as job:
        job.start(0)
        with pytest.raises(pl.RunError, match=r"worker 1, 2 did not join within start_timeout_s=0.3"):
            job.end(0)
    assert caplog.text.count("waiting for rank 1, 2 of 3, for up to start_timeout_s=0.3") == 1


def test_a_loss_that_is_no_scalar_stops_every_rank():
    job = tiny_job(loss=torch.nn.CrossEntropyLoss(reduction="none"))
    with ranks(2, job, protocol="dc_s3gd", stop="updates=30") as started:
        started.start_all()
        for rank in range(2):
            with pytest.raises(pl.UsageError, match=r"the loss is not a scalar"):
                started.end(rank)
