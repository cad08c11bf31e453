"""Local steps against plain loops, and the state of the job's optimizer, in simulated time."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from local_steps_loop import local_steps_loop
from paceline.core.records import GradientArrived, UpdateMade, WorkInterrupted
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from selections import each_value_once, parametrize_few
from tiny_counting import BATCH, tallying_job
from tiny_jobs import batch_norm_net, largest_relative_difference, parameters_of, sgd, tiny_job

EXACT = 1e-12
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def trained(protocol, job, n=3, updates=30, cluster=None, **options):
    cluster = cluster or pl.Cluster(n, pl.timing.Exponential(1.0))
    return pl.train(job, protocol=protocol, cluster=cluster, stop=pl.Stop(updates=updates), seed=3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["bsp", "k_sync(k=2)", "k_batch_async(k=2)", "asp", "asp + staleness_weight"])
@pytest.mark.parametrize("model", [batch_norm_net, None])
def test_one_local_step_of_sgd_is_the_protocol_without_it(protocol, model):
    job = tiny_job(optimizer=sgd(lr=0.1), **({"model": model} if model else {}))
    ours, theirs = trained(f"{protocol} + local_steps(H=1)", job), trained(protocol, job)
    assert largest_relative_difference(parameters_of(ours.model), parameters_of(theirs.model)) < EXACT
    assert ours.time_s == theirs.time_s
    for mine, other in zip(ours.model.buffers(), theirs.model.buffers(), strict=True):
        assert torch.allclose(mine, other, rtol=EXACT)


@parametrize_few("protocol", ["bsp", "backup(k=3)"], keep=1)
def test_synchronous_local_steps_are_local_sgd(protocol):
    outer = "nesterov(lr=0.7, momentum=0.9)"
    job = tiny_job(optimizer=ADAMW, clip_norm=0.5)
    ours = trained(f"{protocol} + local_steps(H=4, outer='{outer}')", job, updates=10)
    theirs = trained(f"local_sgd(H=4, outer='{outer}')", job, updates=40)
    assert largest_relative_difference(parameters_of(ours.model), parameters_of(theirs.model)) < EXACT


def test_interrupted_work_has_the_samples_of_all_its_minibatches():
    run = trained("k_sync(k=2) + local_steps(H=3)", tiny_job(batch_size=7), updates=6)
    interrupted = list(run.history.of(WorkInterrupted))
    assert interrupted
    assert {each.samples for each in interrupted} == {3 * 7}


@pytest.mark.slow
def test_each_worker_keeps_the_state_of_its_optimizer():
    job = tiny_job(optimizer=ADAMW)
    ours = trained("asp + local_steps(H=4, outer='sgd(lr=0.4)')", job)
    arrivals = [(each.worker, each.draw, each.version) for each in ours.history.of(GradientArrived) if each.used]
    assert len({worker for worker, _, _ in arrivals}) == 3
    theirs = local_steps_loop(job, 3, arrivals, steps=4, n=3, outer_lr=0.4)
    assert largest_relative_difference(parameters_of(ours.model), theirs) < EXACT


@pytest.mark.slow
def test_delayed_nesterov_is_its_transcription():
    job, n = tiny_job(optimizer=sgd(lr=0.1)), 3
    outer = "delayed_nesterov(lr=0.7, momentum=0.9, every=4)"
    ours = trained(f"asp + local_steps(H=2, outer='{outer}')", job, updates=22)
    arrivals = [(each.worker, each.draw, each.version) for each in ours.history.of(GradientArrived) if each.used]
    loader, model = MinibatchLoader(job, 3, n), build_model(job, 3)
    versions = [parameters_of(model).numpy()]
    m, deltas = 0.0, []
    for worker, draw, version in arrivals:
        nn.utils.vector_to_parameters(torch.tensor(versions[version]), model.parameters())
        for number in (2 * draw - 1, 2 * draw):
            inputs, target = loader.batch(worker, number, None)
            model.zero_grad()
            job.loss(model(inputs), target).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        deltas.append(versions[version] - parameters_of(model).numpy())
        step = deltas[-1] / 4
        if len(deltas) % 4 == 0:
            m = 0.9 * m + sum(deltas[-4:]) / 4
            step = step + 0.9 * m
        versions.append(versions[-1] - 0.7 * step)
    assert largest_relative_difference(parameters_of(ours.model), torch.tensor(versions[-1])) < EXACT


@pytest.mark.slow
def test_the_optimizer_state_of_work_that_was_not_accepted_is_discarded():
    job = tiny_job(optimizer=ADAMW)
    cluster = pl.Cluster(3, pl.timing.Exponential(1.0), faults=[pl.Fault(worker=0, draw=3, kind="not_finite")])
    ours = trained("ringmaster(r=1) + local_steps(H=2, outer='sgd(lr=0.4)')", job, cluster=cluster)
    records = ours.history.of(GradientArrived)
    assert any(each.reason == "too stale" for each in records)
    assert any(each.reason == "not finite" for each in records)
    arrivals = [(each.worker, each.draw, each.version) for each in records if each.used]
    theirs = local_steps_loop(job, 3, arrivals, steps=2, n=3, outer_lr=0.4)
    assert largest_relative_difference(parameters_of(ours.model), theirs) < EXACT


def test_a_worker_that_was_lost_begins_with_a_new_optimizer_state():
    job = tiny_job(optimizer=ADAMW)
    cluster = pl.Cluster(1, pl.timing.Deterministic(1.0), faults=[pl.Fault(worker=0, draw=3, back_after_s=1.0)])
    ours = trained("asp + local_steps(H=2)", job, cluster=cluster, updates=4)
    draws = [each.draw for each in ours.history.of(GradientArrived)]
    assert draws == [1, 2, 4, 5]
    kept = local_steps_loop(job, 3, [(0, draw, i) for i, draw in enumerate(draws)], steps=2, n=1, outer_lr=1.0)
    assert largest_relative_difference(parameters_of(ours.model), kept) > 1e-3


def test_the_schedule_follows_the_workload_within_and_between_draws():
    rates = []

    class Recorded(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    lr = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda workload: 1.0 + workload)
    job = tiny_job(optimizer=partial(Recorded, lr=1.0), scheduler=lr)
    trained("bsp + local_steps(H=3)", job, n=2, updates=2, cluster=pl.Cluster(2, pl.timing.Deterministic(1.0)))
    of_a_worker = [1, 3, 5], [7, 9, 11]
    assert rates == [*of_a_worker[0] * 2, *of_a_worker[1] * 2]


def test_workload_samples_and_times_count_every_minibatch():
    cluster = pl.Cluster(2, pl.timing.Deterministic(1.0), network=pl.timing.Network(latency_s=0.5))
    result = trained("bsp + local_steps(H=5)", tiny_job(), updates=3, cluster=cluster)
    assert result.time_s == 3 * (0.5 + 5 * 1.0 + 0.5)
    last = result.history.of(UpdateMade)[-1]
    assert (last.workload, last.samples, last.k) == (30, 2 * 5 * 8, 2)
    assert {each.minibatches for each in result.history.of(GradientArrived)} == {5}
    simulated = pl.simulate("bsp + local_steps(H=5)", cluster, updates=3)
    assert simulated.time_s == result.time_s


def test_a_time_for_the_steps_weighs_workers_by_their_samples():
    cluster = pl.Cluster(2, pl.timing.Deterministic(1.0), speed=[1.0, 0.25])
    result = trained("bsp + local_steps(seconds=8.5)", tiny_job(), updates=2, cluster=cluster)
    arrived = [(each.worker, each.minibatches, each.samples) for each in result.history.of(GradientArrived)]
    assert sorted(arrived) == [(0, 8, 64), (0, 8, 64), (1, 2, 16), (1, 2, 16)]
    job, loader = tiny_job(), MinibatchLoader(tiny_job(), 3, 2)
    w = parameters_of(build_model(job, 3))
    momenta = [None, None]
    for draw in (1, 2):
        ends = []
        for worker, steps in ((0, 8), (1, 2)):
            model = build_model(job, 3)
            nn.utils.vector_to_parameters(w.clone(), model.parameters())
            optimizer = job.optimizer(model.parameters())
            if momenta[worker]:
                optimizer.load_state_dict(momenta[worker])
            for step in range(steps):
                inputs, target = loader.batch(worker, (draw - 1) * 1_000_000 + 1 + step, None)
                optimizer.zero_grad()
                job.loss(model(inputs), target).backward()
                optimizer.step()
            momenta[worker] = optimizer.state_dict()
            ends.append(steps * parameters_of(model))
        w = sum(ends) / 10
    assert largest_relative_difference(parameters_of(result.model), w) < EXACT


@pytest.mark.slow
def test_a_worker_makes_at_least_one_step_and_at_most_h():
    cluster = pl.Cluster(2, pl.timing.Deterministic(1.0), speed=[1.0, 0.01])
    result = trained("asp + local_steps(H=3, seconds=20)", tiny_job(), updates=40, cluster=cluster)
    steps = {(each.worker, each.minibatches) for each in result.history.of(GradientArrived)}
    assert steps == {(0, 3), (1, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "sharding", "steps"),
    each_value_once(
        ["bsp", "k_sync(k=2)", "asp", "k_batch_async(k=3)"],
        ["shared", "partitioned"],
        ["H=3", "H=7", "seconds=6", "H=40, seconds=30"],
    ),
)
def test_every_minibatch_of_an_epoch_is_used_once(protocol, sharding, steps):
    samples = 22 * 2 * BATCH
    job = tallying_job(samples, sharding=sharding)
    faults = [pl.Fault(worker=0, draw=2, back_after_s=3.0), pl.Fault(worker=2, draw=3, back_after_s=0.5)]
    cluster = pl.Cluster(4, pl.timing.Exponential(1.0), speed=[1.0, 0.5, 1.0, 2.0], faults=faults)
    result = pl.train(job, protocol=f"{protocol} + local_steps({steps})", cluster=cluster, stop="epochs=3")
    assert job.data.times_used(result.history) == [3] * samples
    assert result.stopped_by == "epochs"
    used = [each for each in result.history.of(GradientArrived) if each.used]
    assert sum(each.minibatches for each in used) == 3 * samples // BATCH
    assert sum(each.samples for each in used) == 3 * samples


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pl.local_steps(), r"type for example local_steps\(H=16\) or local_steps\(seconds=5\)"),
        (lambda: pl.local_steps(H=0), r"H=0 is not a whole number in \[1, inf\)"),
        (lambda: pl.local_steps(seconds=0.0), r"seconds=0.0 is not a number in \(0, inf\)"),
        (lambda: pl.local_steps(seconds=float("nan")), "seconds=nan is not a number"),
        (lambda: pl.local_steps(H=4, outer="adam"), "known: delayed_nesterov, nesterov, sgd"),
        (lambda: pl.local_steps(H=4, outer="delayed_nesterov"), r"type delayed_nesterov\(every=...\)"),
        (lambda: pl.local_steps(H=4, outer="delayed_nesterov(every=0)"), "every=0 is not a whole number"),
        (lambda: pl.local_sgd(H=4, outer="delayed_nesterov(every=3)"), r"asp \+ local_steps\(H=4"),
        (lambda: pl.bsp() + pl.local_steps(H=2) + pl.local_steps(H=2), "has local steps already"),
        (lambda: trained("local_sgd(H=4) + local_steps(H=2)", tiny_job()), "has no server"),
        (lambda: trained("all_reduce + local_steps(seconds=2)", tiny_job()), r"type local_sgd\(H=16\) alone"),
        (lambda: trained("asp + dc_asgd(lambda0=1) + local_steps(H=2)", tiny_job()), "the sum of its steps"),
        (lambda: trained("auto + local_steps(H=2)", tiny_job()), "sets the learning rate from the variance"),
        (
            lambda: trained("bsp@updates=3 >> asp + local_steps(H=2)", tiny_job()),
            r"add local_steps\(H=2\) to every part, or to none",
        ),
        (lambda: trained("bsp + local_steps(H=2)", tiny_job(lr_rule="noise")), "lr_rule='noise'"),
        (lambda: trained("bsp + local_steps(H=2)", tiny_job(lr_is="per_worker")), "leave them out"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(pl.UsageError, match=message):
        make()


def test_a_plan_keeps_its_local_steps():
    protocol = "bsp + local_steps(H=2)@updates=3 >> asp + local_steps(H=2)"
    result = trained(protocol, tiny_job(optimizer=ADAMW), updates=12)
    assert [each.k for each in result.history.of(UpdateMade)] == [3, 3, 3, *[1] * 9]
    assert np.isfinite(parameters_of(result.model).numpy()).all()
