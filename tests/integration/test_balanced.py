"""Shares of the workers in an update: parameters of BSP, at the speed of the average worker."""

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import paceline as pl
import rank_threads
import tcp_threads
from paceline.core.events import Minibatch, MinibatchSlice
from paceline.core.gradient import SKIPPED
from paceline.core.records import DecisionMade, GradientArrived, UpdateMade
from paceline.errors import UsageError
from paceline.report.write import write_report
from paceline.run.replay import replay
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model
from ranks import flat
from selections import parametrize_few
from tiny_controllers import ChangingShares
from tiny_jobs import dataset, largest_relative_difference, parameters_of, plain_loop, tiny_job
from tiny_tokens import mean_over_tokens, token_job, tokens_of


class Endless(IterableDataset):
    def __iter__(self):
        yield from dataset()


EXACT = 1e-12
N, UPDATES = 4, 30
BALANCED = "balanced(m=4, leases=1)"
CLUSTER = pl.Cluster(N, pl.timing.LogNormal(0.1, 0.05), speed=[1, 1, 1, 0.5])


def trained(protocol, cluster=CLUSTER, updates=UPDATES, **job):
    return pl.train(tiny_job(**job), protocol=protocol, cluster=cluster, stop=pl.Stop(updates=updates), seed=3)


def difference(ours, theirs):
    return largest_relative_difference(parameters_of(ours.model), parameters_of(theirs.model))


def shares_of(result):
    return [each for each in result.history.of(DecisionMade) if each.kind == "shares"]


ADAM = partial(torch.optim.AdamW, lr=0.01)
JOBS = {
    "replacement": {},
    "epoch": {"sampling": "epoch"},
    "adam": {"optimizer": ADAM, "sampling": "epoch"},
    "clipped": {"clip_norm": 0.1},
    "microbatches": {"microbatches": 3},
    "scheduler": {"sampling": "epoch", "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=20)},
    "no whole pieces": {"batch_size": 7},
    "noise": {"lr_rule": "noise", "microbatches": 2},
}


@parametrize_few("job", JOBS.values(), ids=JOBS, keep=1)
def test_parameters_are_those_of_bsp_under_shares_that_change(job):
    forced, bsp = trained(pl.bsp().controlled_by(ChangingShares()), **job), trained("bsp", **job)
    assert len({each.reason for each in shares_of(forced)}) == 5
    assert difference(forced, bsp) < EXACT
    losses = [[each.loss for each in run.history.of(UpdateMade)] for run in (forced, bsp)]
    assert np.allclose(*losses, rtol=1e-9)


def over_all_tokens(job, updates, seed=3):
    """Train with a plain loop, in which an update is the mean over all tokens of its minibatches."""
    model = build_model(job, seed)
    optimizer, loader = job.optimizer(model.parameters()), MinibatchLoader(job, seed, N)
    for draw in range(1, updates + 1):
        batches = [loader.batch(worker, draw, None) for worker in range(N)]
        optimizer.zero_grad()
        for batch in batches:
            share = int(tokens_of(batch)) / int(sum(map(tokens_of, batches)))
            (mean_over_tokens(model, batch) * share).backward()
        optimizer.step()
    return model


@parametrize_few("microbatches", [1, 3], keep=1)
@parametrize_few("protocol", ["balanced(m=4)", "bsp", BALANCED], keep=2)
def test_with_a_weight_all_tokens_of_an_update_count_alike(protocol, microbatches):
    job = token_job(step=mean_over_tokens, weight=tokens_of, microbatches=microbatches, eval_data=None)
    ours = pl.train(job, protocol=protocol, cluster=CLUSTER, stop="updates=12", seed=3).model
    theirs = parameters_of(over_all_tokens(job, 12))
    assert largest_relative_difference(parameters_of(ours), theirs) < EXACT
    by_samples = pl.train(replace(job, weight=None), protocol="bsp", cluster=CLUSTER, stop="updates=12", seed=3).model
    assert largest_relative_difference(parameters_of(by_samples), theirs) > 1e-3


@pytest.mark.parametrize("shards", [1, 2])
def test_ranks_with_a_server_weigh_as_the_simulation_does(shards):
    job = token_job(step=mean_over_tokens, weight=tokens_of, eval_data=None)
    engine = {"worker_at_server": True, "shards": shards}
    [end, *_] = rank_threads.run(3, job, engine, protocol="bsp", stop="updates=12")
    expected = pl.train(job, protocol="bsp", cluster=pl.Cluster(3), stop="updates=12", seed=1).model
    assert largest_relative_difference(flat(end.parameters), flat(expected.state_dict())) < EXACT


@pytest.mark.slow
def test_local_workers_weigh_as_the_simulation_does():
    job = token_job(step=mean_over_tokens, weight=tokens_of, eval_data=None)
    ours, expected = (
        pl.train(job, protocol="bsp", cluster=cluster, stop="updates=12").model
        for cluster in (pl.LocalCluster(3), pl.Cluster(3))
    )
    assert largest_relative_difference(parameters_of(ours), parameters_of(expected)) < EXACT


def with_dropout():
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()


def test_a_whole_minibatch_has_the_dropout_of_bsp():
    ours, theirs = trained("balanced(m=1)", model=with_dropout), trained("bsp", model=with_dropout)
    assert difference(ours, theirs) < EXACT


def test_both_copies_of_a_lease_have_the_same_dropout():
    alike = TensorDataset(torch.ones(8, 5).double(), torch.zeros(8, dtype=torch.int64))
    replica = Replica(tiny_job(model=with_dropout, data=alike), 3, N)
    version = replica.layout.allocate()
    version.parameters[0].normal_()
    whole = MinibatchSlice(worker=1, draw=5, epoch=None, number=None, begin=0, end=8)
    gradients = []
    for worker, draw, begin in ((0, 7, 4), (3, 2, 4), (0, 7, 2)):
        lease = Minibatch(0, None, None, slices=(whole._replace(begin=begin, end=begin + 4),), share=0.5)
        gradient = replica.layout.allocate()
        replica.gradient(worker, draw, lease, version, gradient)
        gradients.append(gradient.memory)
    assert torch.equal(*gradients[:2])
    assert not torch.equal(*gradients[1:])


def test_a_minibatch_of_weight_zero_is_not_used():
    job = tiny_job(weight=lambda batch: float(batch[1][0] > 0))
    result = pl.train(job, protocol="bsp", cluster=CLUSTER, stop="updates=12")
    dropped = [each for each in result.history.of(GradientArrived) if not each.used]
    assert {each.reason for each in dropped} == {SKIPPED}
    assert 5 < len(dropped) < 40


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [BALANCED, "balanced(m=4)"])
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_parameters_are_those_of_bsp_under_shares_that_follow_speeds(job, protocol):
    balanced, bsp = trained(protocol, **job), trained("bsp", **job)
    assert shares_of(balanced)
    assert difference(balanced, bsp) < EXACT
    assert balanced.time_s < bsp.time_s / 1.3


@parametrize_few("law", [pl.timing.LogNormal(0.1, 0.3), pl.timing.Deterministic(0.1)], keep=1)
def test_even_workers_have_the_bits_of_bsp(law):
    balanced, bsp = (trained(protocol, pl.Cluster(N, law)) for protocol in (BALANCED, "bsp"))
    assert shares_of(balanced) == []
    assert torch.equal(parameters_of(balanced.model), parameters_of(bsp.model))
    assert balanced.time_s == bsp.time_s


def test_every_update_has_the_samples_of_a_minibatch_of_each_worker():
    result = trained(BALANCED)
    assert {each.samples for each in result.history.of(UpdateMade)} == {N * 8}
    assert {each.worker: each.samples for each in result.history.of(GradientArrived)}[3] == 4  # in the last update


def test_leases_of_a_queue_have_the_parameters_of_bsp_without_a_sample_twice():
    queue, bsp = trained("balanced(m=4)", sampling="epoch"), trained("bsp", sampling="epoch")
    assert difference(queue, bsp) < EXACT
    assert queue.time_s < bsp.time_s / 1.4
    updates = list(queue.history.of(UpdateMade))
    assert {each.samples for each in updates} == {N * 8}
    assert [each.workload for each in updates] == [N * (number + 1) for number in range(UPDATES)]
    assert max(each.k for each in updates) > N


def test_a_worker_that_hangs_delays_an_update_of_a_queue_by_one_lease():
    hangs = [pl.Fault(worker=1, draw=1, kind="hang")]
    runs = [trained("balanced(m=4)", replace(CLUSTER, faults=faults), updates=12) for faults in ([], hangs)]
    assert difference(*runs) < EXACT
    assert runs[0].time_s < runs[1].time_s < runs[0].time_s + 0.3


def test_simulated_times_are_those_of_training():
    cluster = replace(CLUSTER, network=pl.timing.Network(latency_s=0.01))
    pieces = pl.simulate("balanced(m=8, leases=1)", cluster, updates=UPDATES, seed=3)
    assert trained("balanced(m=8, leases=1)", cluster).time_s == pytest.approx(pieces.time_s)


@pytest.mark.parametrize("protocol", [BALANCED, "balanced(m=4)"])
def test_a_recorded_run_replays_with_its_shares(tmp_path, protocol):
    moving = [
        pl.timing.Periodic(on_s=2.0, every_s=8.0, slowdown=3.0, workers=(worker,), at_s=2.0 * worker)
        for worker in (0, 1)
    ]
    cluster = pl.Cluster(N, pl.timing.LogNormal(0.1, 0.1), slowdowns=moving)
    result = pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop="updates=60", seed=1, out=tmp_path / "run")
    assert len(shares_of(result)) >= 3
    replayed = replay(tmp_path / "run")
    assert replayed.is_same, replayed.difference


def test_a_worker_that_dies_and_comes_back():
    faults = [pl.Fault(worker=0, draw=12, back_after_s=1.0)]
    result = trained(BALANCED, replace(CLUSTER, faults=faults), updates=60, sampling="epoch")
    workers = [sorted(map(int, each.numbers)) for each in shares_of(result)]
    assert [0, 1, 2, 3] == workers[0] == workers[-1]
    assert [1, 2, 3] in workers


def test_a_plan_with_shares_in_one_part():
    result = trained(f"{BALANCED}@updates=20 >> asp", updates=60)
    late = [each for each in result.history.of(GradientArrived) if each.version > 20]
    assert shares_of(result)
    assert {each.samples for each in late} == {8}


@pytest.mark.parametrize(
    ("protocol", "text"),
    [
        ("balanced(m=4, leases=2)", r"leases=2\): expected leases='queue' or 1; type balanced\(m=4, leases=1\)"),
        ("balanced(m=4, leases=1, batch=live)", r"one share each is of live workers; type balanced\(m=4, leases=1\)"),
        ("balanced(m=0, leases=1)", "pieces"),
        ("balanced(leases=1, max_share=0.5)", "max_share"),
        (f"{BALANCED} + local_steps(H=4)", r"a local step takes a whole one; type bsp \+ local_steps\(H=4\)"),
        (f"{BALANCED} + staleness_lr(C=0.01)", "no gradient of .* is ever stale"),
        (pl.k_sync(k=3) + pl.controllers.Balance(), r"updates of one fresh gradient of every worker; type balanced"),
        (
            pl.bsp() + pl.controllers.Balance() + pl.controllers.FixedQuorum(k=2),
            "made of 2 gradients; leave one of the two out",
        ),
    ],
    ids=str,
)
def test_what_shares_cannot_be_is_refused_by_name(protocol, text):
    with pytest.raises(UsageError, match=text):
        trained(protocol)


@pytest.mark.parametrize(
    "job", [{"data": Endless()}, {"sharding": "partitioned", "sampling": "epoch"}], ids=["iterable", "partitioned"]
)
def test_data_that_a_worker_has_alone_are_refused(job):
    with pytest.raises(UsageError, match=r"each worker reads its own; give .*, or type bsp"):
        trained(BALANCED, **job)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [BALANCED, "balanced(m=4)"])
def test_worker_processes_have_the_parameters_of_bsp_and_follow_their_speeds(protocol):
    slowness = pl.Cluster(N, pl.timing.Deterministic(0.04), speed=[1, 1, 1, 0.25])
    balanced = trained(protocol, pl.LocalCluster(N, slowness=slowness), sampling="epoch")
    bsp = trained("bsp", slowness, sampling="epoch")
    assert difference(balanced, bsp) < EXACT
    assert {each.samples for each in balanced.history.of(UpdateMade)} == {N * 8}
    computed = Counter()
    for each in balanced.history.of(GradientArrived):
        computed[each.worker] += each.samples
    assert computed[3] < 0.8 * min(computed[worker] for worker in range(3))


ON_RANKS = pytest.mark.parametrize(
    ("run", "world_size", "settings", "more"),
    [
        (tcp_threads.run, 4, {}, {}),
        (tcp_threads.run, 4, {"shards": 2}, {}),
        (rank_threads.run, 6, {"workers": "node"}, {"nodes": 3}),
    ],
    ids=["ranks", "shards", "hosts"],
)


@pytest.mark.slow
@ON_RANKS
def test_leases_of_ranks_have_the_parameters_of_bsp(run, world_size, settings, more):
    job = tiny_job(sampling="epoch", loader_workers=0)
    slowness = pl.Cluster(3, pl.timing.Deterministic(0.02), speed=[1, 1, 0.25])
    ends = run(world_size, job, {**settings, "slowness": slowness}, protocol="balanced(m=4)", stop="updates=15", **more)
    bsp = pl.train(job, protocol="bsp", cluster=pl.Cluster(3), stop="updates=15", seed=1)
    assert {record.samples for record in ends[0].of(UpdateMade)} == {3 * 8}
    assert {record.workload for record in ends[0].of(UpdateMade)} == {3 * update for update in range(1, 16)}
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(bsp.model.state_dict())) < EXACT


@pytest.mark.slow
@ON_RANKS
def test_ranks_have_the_parameters_of_bsp_under_shares_that_change(run, world_size, settings, more):
    protocol, job = pl.bsp().controlled_by(ChangingShares()), tiny_job(sampling="epoch", loader_workers=0)
    ends = run(world_size, job, settings, protocol=protocol, stop="updates=15", **more)
    bsp = pl.train(job, protocol="bsp", cluster=pl.Cluster(3), stop="updates=15", seed=1)
    assert len({record.samples for record in ends[0].of(GradientArrived)}) > 3
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(bsp.model.state_dict())) < EXACT


def skipped_version(updates):
    """Return the version of the update that was skipped, which counts as its minibatches."""
    [skipped] = [each for each in updates if each.k == 0]
    assert skipped.reason == "skipped, because the gradient of worker 1 is not finite"
    return skipped.version


@pytest.mark.parametrize("draw", [1, 3])
@parametrize_few("protocol", ["balanced(m=4)", BALANCED], keep=2)
def test_a_gradient_that_is_not_finite_skips_the_update(protocol, draw, tmp_path):
    step_lr = partial(torch.optim.lr_scheduler.StepLR, step_size=20)
    cluster = replace(CLUSTER, faults=[pl.Fault(worker=1, draw=draw, kind="not_finite")])
    out, job = tmp_path / "run", tiny_job(scheduler=step_lr)
    result = pl.train(job, protocol=protocol, cluster=cluster, stop="updates=15", seed=3, out=out)
    updates, bsp = list(result.history.of(UpdateMade)), trained("bsp", updates=15, scheduler=step_lr)
    rates = [[(each.workload, each.learning_rate) for each in run] for run in (updates, bsp.history.of(UpdateMade))]
    assert rates[0] == rates[1]
    assert replay(out).is_same
    assert write_report([out]).exists()
    constant = trained(protocol, cluster, updates=15)
    version = skipped_version(constant.history.of(UpdateMade))
    expected = plain_loop(tiny_job(), 3, N, 15, skipped={version})
    assert largest_relative_difference(parameters_of(constant.model), parameters_of(expected)) < EXACT


ENGINES = {
    "ranks": (rank_threads.run, 3, {"worker_at_server": True}, {}),
    "shards": (tcp_threads.run, 4, {"shards": 2}, {}),
    "hosts": (rank_threads.run, 6, {"workers": "node"}, {"nodes": 3}),
    "no server": (rank_threads.run, 3, {"server": False}, {}),
}


@parametrize_few("protocol", ["balanced(m=4, backups=false)", BALANCED], keep=1)
@parametrize_few("engine", ENGINES, keep=2)
def test_ranks_skip_the_update_of_a_gradient_that_is_not_finite(engine, protocol):
    run, world_size, settings, more = ENGINES[engine]
    job, faults = tiny_job(loader_workers=0), [pl.Fault(worker=1, draw=3, kind="not_finite")]
    ends = run(world_size, job, {**settings, "faults": faults}, protocol=protocol, stop="updates=12", **more)
    version = skipped_version(ends[0].of(UpdateMade))
    expected = parameters_of(plain_loop(job, 1, 3, 12, skipped={version}))
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), expected) < EXACT


@pytest.mark.parametrize(("m", "said"), [(4, ["no 4 equal pieces, so a piece has 1 sample: give"]), (7, [])])
def test_pieces_that_do_not_divide_the_batch_are_told(m, said, caplog):
    trained(f"balanced(m={m})", updates=2, batch_size=7)
    told = [each.getMessage() for each in caplog.records if "pieces" in each.getMessage()]
    assert len(told) == len(said)
    assert all(part in line for part, line in zip(said, told, strict=True))
