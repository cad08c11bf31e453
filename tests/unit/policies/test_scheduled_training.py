"""Training with a learning-rate schedule against updates written out by hand, and its optimizer groups."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.records import DecisionMade
from paceline.server.optimizer import make_optimizer, stepping
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from selections import parametrize_few
from tiny_jobs import batch_norm_net, largest_relative_difference, parameters_of, tiny_job

EXACT = 1e-12
SCHEDULE = pl.plans.LinearSchedule(warm_up="50%", warm_up_until="30%", weight_decay=2.3)
DECAYED = {
    "optimizer": partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.05),
    "lr_rule": "proportional",
    "lr_is": "per_worker",
    "schedule": SCHEDULE,
}


def by_hand(job, n, updates, spared=()):
    """N workers and one momentum SGD, each update written out: eta = 0.02 N s, weight decay 0.05 * 2.3 s."""
    model, loader = build_model(job, 0), MinibatchLoader(job, 0, n)
    named = dict(model.named_parameters())
    velocity = {name: torch.zeros_like(each) for name, each in named.items()}
    total, warm_up, until = n * updates, 0.5 * n * updates, 0.3 * n * updates
    for t in range(updates):
        w = n * t + n / 2
        s = w / warm_up if w < until else until / warm_up * (total - w) / (total - until)
        losses = []
        for worker in range(n):
            inputs, target = loader.batch(worker, t + 1, None)
            losses.append(F.cross_entropy(model(inputs), target) / n)
        gradients = torch.autograd.grad(sum(losses), list(named.values()))
        with torch.no_grad():
            for (name, each), gradient in zip(named.items(), gradients, strict=True):
                decay = 0.0 if name in spared else 0.05 * 2.3 * s
                velocity[name] = 0.9 * velocity[name] + gradient + decay * each
                each -= 0.02 * n * s * velocity[name]
    return model


@parametrize_few(("protocol", "n"), [("bsp", 4), ("bsp", 1), ("asp", 1)], keep=1)
@pytest.mark.parametrize("make_cluster", [pl.Cluster, pytest.param(pl.LocalCluster, marks=pytest.mark.slow)])
def test_training_equals_the_plain_update(protocol, n, make_cluster):
    job = tiny_job(**DECAYED)
    run = pl.train(job, protocol=protocol, cluster=make_cluster(n), stop=pl.Stop(gradients=30 * n))
    plain = by_hand(job, n, 30)
    assert largest_relative_difference(parameters_of(run.model), parameters_of(plain)) < EXACT


@parametrize_few(("protocol", "n"), [("all_reduce", 4), ("local_sgd(H=1)", 4), ("dc_s3gd", 1)], keep=1)
def test_all_reduce_workers_make_the_plain_update(protocol, n):
    job = tiny_job(**DECAYED)
    run = pl.train(job, protocol=protocol, cluster=pl.Cluster(n), stop=pl.Stop(gradients=30 * n))
    assert largest_relative_difference(parameters_of(run.model), parameters_of(by_hand(job, n, 30))) < EXACT


def test_training_with_undecayed_norms_equals_the_plain_update():
    job = tiny_job(**DECAYED, model=batch_norm_net, no_decay_on=pl.jobs.BATCH_NORMS)
    stop = pl.Stop(gradients=50)
    run = pl.train(job, protocol="bsp", cluster=pl.Cluster(1), stop=stop)
    ours, spared, decayed = (
        parameters_of(model) for model in (run.model, by_hand(job, 1, 50, ("1.weight", "1.bias")), by_hand(job, 1, 50))
    )
    assert largest_relative_difference(ours, spared) < EXACT
    assert largest_relative_difference(ours, decayed) > 1e-6


@parametrize_few(("protocol", "k"), [("bsp", 4), ("k_async(k=2)", 2), ("asp", 1), ("bsp@25% >> asp", None)], keep=1)
def test_the_rate_follows_the_workload_under_every_protocol(protocol, k):
    job = tiny_job(schedule=SCHEDULE, lr_rule="proportional", lr_is="per_worker")
    columns = pl.train(job, protocol=protocol, cluster="4*exp(mean=1)", stop="gradients=120").history.columns()
    assert set(columns["k"]) == ({k} if k else {1, 4})
    workload = columns["workload"] - columns["k"] / 2
    expected = [w / 60 if w < 36 else 0.6 * (120 - w) / 84 for w in workload]
    assert list(columns["learning_rate"]) == pytest.approx(
        [0.1 * k * s for k, s in zip(columns["k"], expected, strict=True)]
    )


@pytest.mark.slow
def test_the_warm_up_of_a_run_ends_at_the_first_check_with_a_plateau():
    job = tiny_job(schedule=pl.plans.LinearSchedule(check_every="epochs=1"), sampling="epoch", lr_is="per_worker")
    run = pl.train(job, protocol="k_async(k=3)", cluster="4*exp(mean=1)", stop="epochs=20")
    losses = [each.loss for each in run.history.of(pl.callbacks.GradientArrived) if each.used]
    epochs = [sum(losses[i : i + 12]) / 12 for i in range(0, len(losses), 12)]
    first = next(epoch for epoch, (one, other) in enumerate(pairwise(epochs), 2) if other >= one)
    assert first < 10
    [decided] = [each.reason for each in run.history.of(DecisionMade) if each.kind == "warm_up"]
    assert decided.startswith(f"ends after {12 * first} gradients at {first / 10:.4g} of the full rate: plateau")


def test_a_step_uses_scaled_rate_and_decay_without_changing_the_optimizer():
    parameter = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    for make, expected in (
        (torch.optim.SGD, 2 - 0.1 * 0.5 * (1 + 0.3 * 2 * 2.0)),
        (torch.optim.AdamW, 2 - 0.1 * 0.5 * 0.3 * 2 * 2.0 - 0.1 * 0.5),
    ):
        optimizer = make([parameter], lr=0.1, weight_decay=0.3)
        parameter.data.fill_(2.0)
        parameter.grad = torch.ones_like(parameter)
        with stepping(optimizer, 1.0, weight_decay_scale=2.0):
            assert optimizer.param_groups[0]["weight_decay"] == 0.6
        with stepping(optimizer, 0.5, weight_decay_scale=2.0):
            optimizer.step()
        assert parameter.item() == pytest.approx(expected, rel=1e-7)
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.1, 0.3)


def test_an_optimizer_without_weight_decay_scales_only_the_rate():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SparseAdam([parameter])
    with stepping(optimizer, 0.5, weight_decay_scale=2.0):
        assert optimizer.param_groups[0]["lr"] == 0.0005
    assert "weight_decay" not in optimizer.param_groups[0]


def groups_of(job):
    model = build_model(job, 0)
    optimizer = make_optimizer(job, list(model.parameters()), model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(group["weight_decay"], [names[id(each)] for each in group["params"]]) for group in optimizer.param_groups]


def norms_alone():
    return nn.Sequential(nn.BatchNorm1d(5), nn.LayerNorm(5))


def test_only_normalization_layers_are_in_the_group_without_weight_decay():
    everything = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    job = tiny_job(model=batch_norm_net, optimizer=DECAYED["optimizer"])
    assert groups_of(job) == [(0.05, everything)]
    spared = tiny_job(model=batch_norm_net, optimizer=DECAYED["optimizer"], no_decay_on=pl.jobs.BATCH_NORMS)
    assert groups_of(spared) == [(0.05, everything[:2] + everything[4:]), (0.0, everything[2:4])]
    without = tiny_job(optimizer=DECAYED["optimizer"], no_decay_on=pl.jobs.BATCH_NORMS)
    assert groups_of(without) == [(0.05, ["0.weight", "0.bias", "2.weight", "2.bias"])]
    both = tiny_job(
        model=norms_alone,
        optimizer=DECAYED["optimizer"],
        no_decay_on=[*pl.jobs.BATCH_NORMS, nn.LayerNorm],
        name="norms",
    )
    assert groups_of(both) == [(0.0, ["0.weight", "0.bias", "1.weight", "1.bias"])]
