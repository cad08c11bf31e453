"""The parameter server against plain torch, for every kind of optimizer, parameter and buffer."""

from functools import partial
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

import paceline as pl
from odd_parts import OPTIMIZERS, Odd
from paceline.core.records import UpdateMade
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from paceline.worker.evaluation import evaluate
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model
from selections import parametrize_few
from tiny_jobs import (
    batch_norm_net,
    dataset,
    largest_relative_difference,
    parameters_of,
    plain_loop,
    sgd,
    small_net,
    tiny_job,
    update_of,
)

EXACT = 1e-12


def trained(n=2, updates=20, protocol=None, **changes):
    return pl.train(
        tiny_job(**changes), protocol=protocol or pl.bsp(), cluster=pl.Cluster(n), stop=pl.Stop(updates=updates), seed=3
    )


@parametrize_few("optimizer", OPTIMIZERS.values(), keep=1, ids=OPTIMIZERS)
def test_any_optimizer_equals_its_step_in_one_process(optimizer):
    result = trained(optimizer=optimizer)
    plain = plain_loop(tiny_job(optimizer=optimizer), seed=3, n=2, updates=20)
    assert largest_relative_difference(parameters_of(result.model), parameters_of(plain)) < 1e-10


def pieces(job):
    replica = Replica(job, 0, 4)
    server = ParameterServer(job, build_model(job, 0), replica.layout, per_epoch=10)
    return replica, server


def constant_gradient(layout, value):
    gradient = layout.allocate()
    for flat in gradient.flat_parameters:
        flat.fill_(value)
    return gradient


def test_the_mean_is_over_the_samples_received():
    _, server = pieces(tiny_job(optimizer=sgd(lr=1.0)))
    before = parameters_of(server.model)
    layout = FlatLayout(server.model)
    server.enqueue(constant_gradient(layout, 1.0), weight=8)
    server.enqueue(constant_gradient(layout, 4.0), weight=4)
    server.apply(update_of(2))
    assert torch.allclose(before - parameters_of(server.model), torch.tensor(2.0).double(), rtol=EXACT)


def test_the_learning_rate_is_scaled_for_one_step_only():
    _, server = pieces(tiny_job(optimizer=sgd(lr=1.0)))
    layout = FlatLayout(server.model)
    before = parameters_of(server.model)
    server.enqueue(constant_gradient(layout, 1.0), weight=8)
    server.apply(update_of(1, lr_scale=0.25))
    assert torch.allclose(before - parameters_of(server.model), torch.tensor(0.25).double())
    assert server.learning_rate == 1.0


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_momentum_is_limited_for_one_step_only_and_a_limit_of_zero_resets_it(nesterov):
    own = 0.9
    _, server = pieces(tiny_job(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=own, nesterov=nesterov)))
    layout = FlatLayout(server.model)
    expected, velocity = parameters_of(server.model), 0.0
    for step, limit in enumerate([inf, inf, 0.0, 0.25, 0.5, 0.95, 0.0, inf]):
        momentum, gradient = min(own, limit), 1.0 + step
        velocity = momentum * velocity + gradient
        expected = expected - 0.1 * (gradient + momentum * velocity if nesterov else velocity)
        server.enqueue(constant_gradient(layout, gradient), weight=8)
        server.apply(update_of(1, momentum_limit=limit))
        assert torch.allclose(parameters_of(server.model), expected, rtol=EXACT)
        assert server.optimizer.param_groups[0]["momentum"] == own


@parametrize_few(
    ("rule", "lr_is", "factor"),
    [
        ("constant", "total", 1.0),
        ("proportional", "total", 3 / 4),
        ("constant", "per_worker", 4.0),
        ("proportional", "per_worker", 3.0),
    ],
    keep=1,
)
def test_the_learning_rate_follows_the_quorum(rule, lr_is, factor):
    result = trained(n=4, protocol=pl.k_sync(k=3), optimizer=sgd(lr=0.01), lr_rule=rule, lr_is=lr_is)
    assert {record.learning_rate for record in result.history.of(UpdateMade)} == {0.01 * factor}


class Greedy(torch.optim.SGD):
    """Uses the gradient's memory for its own purposes."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.fill_(7.0)


def test_an_optimizer_that_modifies_the_gradient_leaves_the_buffers_unchanged():
    changed, left = (
        trained(model=batch_norm_net, optimizer=partial(kind, lr=0.1), protocol=pl.asp(), updates=5)
        for kind in (Greedy, torch.optim.SGD)
    )
    assert changed.model.state_dict().keys() == left.model.state_dict().keys()
    for ours, theirs in zip(changed.model.state_dict().values(), left.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_clipping_acts_on_the_mean_gradient():
    _, server = pieces(tiny_job(optimizer=sgd(lr=1.0), clip_norm=0.5))
    before = parameters_of(server.model)
    server.enqueue(constant_gradient(FlatLayout(server.model), 3.0), weight=8)
    server.apply(update_of(1))
    assert torch.linalg.vector_norm(before - parameters_of(server.model)) == pytest.approx(0.5, rel=1e-6)


def halve_at(*milestones):
    return partial(MultiStepLR, milestones=list(milestones), gamma=0.5)


@parametrize_few(("protocol", "k"), [(pl.bsp(), 4), (pl.k_sync(k=2), 2), (pl.asp(), 1)], ids=str, keep=1)
def test_schedules_advance_by_workload(protocol, k):
    result = trained(n=4, updates=40 // k, protocol=protocol, optimizer=sgd(lr=0.01), scheduler=halve_at(20))
    rates = [record.learning_rate for record in result.history.of(UpdateMade)]
    assert rates == [0.01] * (20 // k) + [0.005] * (20 // k)


def test_schedules_by_epoch():
    result = trained(n=1, updates=30, optimizer=sgd(lr=0.01), scheduler=halve_at(2), schedule_unit="epoch")
    rates = [record.learning_rate for record in result.history.of(UpdateMade)]
    assert rates == [0.01] * 24 + [0.005] * 6  # 96 samples, batches of 8: 12 gradients an epoch


def test_a_scheduler_may_begin_below_the_optimizers_rate():
    warm_up = partial(LambdaLR, lr_lambda=warm)
    result = trained(n=1, updates=4, optimizer=sgd(lr=1.0), scheduler=warm_up)
    assert [record.learning_rate for record in result.history.of(UpdateMade)] == [0.25, 0.5, 0.75, 1.0]


def warm(step):
    return (step + 1) / 4


@parametrize_few("cluster", [pl.Cluster(2), pl.LocalCluster(2)], ids=["virtual", "local"], keep=1)
def test_frozen_tied_unused_and_mixed_parameters_and_buffers_work(cluster):
    job = tiny_job(model=Odd, optimizer=sgd())
    result = pl.train(job, protocol=pl.bsp(), cluster=cluster, stop=pl.Stop(updates=5), seed=3)
    before, after = build_model(job, 3), result.model
    plain = plain_loop(job, seed=3, n=2, updates=5)
    assert torch.equal(before.frozen.weight, after.frozen.weight)
    assert torch.equal(before.unused.weight, after.unused.weight)
    assert after.tied.weight is after.first.weight
    assert not torch.equal(before.last.weight, after.last.weight)
    assert torch.allclose(plain.last.weight, after.last.weight, rtol=1e-5)
    assert torch.allclose(plain.first.weight, after.first.weight, rtol=1e-6)
    assert after.calls == 5  # whole numbers and booleans: those of worker 0
    assert after.seen.any()


def test_each_dtype_has_one_vector():
    layout = FlatLayout(Odd())
    vectors = layout.allocate()
    assert {flat.dtype for flat in vectors.flat_parameters} == {torch.float64, torch.float32}
    assert {flat.dtype for flat in vectors.flat_buffers} == {torch.bool, torch.int64}
    assert sum(flat.numel() for flat in vectors.flat_parameters) == sum(
        parameter.numel() for parameter in Odd().parameters() if parameter.requires_grad
    )


def test_workers_copy_no_parameters():
    replica, server = pieces(tiny_job())
    version, gradient = replica.layout.allocate(), replica.layout.allocate()
    server.publish(version)
    replica.gradient(0, 1, None, version, gradient)
    for parameter, view, change in zip(
        replica.model.parameters(), version.parameters, gradient.parameters, strict=True
    ):
        assert parameter.data_ptr() == view.data_ptr()
        assert parameter.grad.data_ptr() == change.data_ptr()


def test_microbatches_give_the_gradient_of_the_whole_batch():
    whole, server = pieces(tiny_job())
    parts, _ = pieces(tiny_job(microbatches=3))
    version = whole.layout.allocate()
    server.publish(version)
    one, three = whole.layout.allocate(), whole.layout.allocate()
    a = whole.gradient(0, 1, None, version, one)
    b = parts.gradient(0, 1, None, version, three)
    assert largest_relative_difference(one.flat_parameters[0], three.flat_parameters[0]) < EXACT
    assert (a.loss, a.squared_norm) == (pytest.approx(b.loss), pytest.approx(b.squared_norm))
    assert a.squared_norm == pytest.approx(float((one.flat_parameters[0] ** 2).sum()))


@pytest.mark.slow
def test_bfloat16_models_train():
    job = tiny_job(model=partial(small_net, torch.bfloat16), data=dataset(dtype=torch.bfloat16), optimizer=sgd())
    result = pl.train(job, protocol=pl.bsp(), cluster=pl.Cluster(2), stop=pl.Stop(updates=200), seed=3)
    losses = result.history.columns()["loss"]
    assert losses[-20:].mean() < losses[:20].mean()


def test_an_incompatible_model_is_refused(monkeypatch):
    class Little:
        available = 1000

    monkeypatch.setattr("psutil.virtual_memory", Little)
    with pytest.raises(pl.UsageError, match=r"up to 3 versions of .* MiB for 2 workers.*are available"):
        trained()


def loss_of_dict(model, batch):
    output = model(batch["inputs"])
    loss = F.cross_entropy(output, batch["target"])
    return loss, {"accuracy": (output.argmax(1) == batch["target"]).float().mean()}


def as_dict(samples):
    inputs, target = zip(*samples, strict=True)
    return {"inputs": torch.stack(inputs), "target": torch.stack(target)}


def test_a_step_function_with_dict_batches_and_metrics():
    job = tiny_job(loss=None, step=loss_of_dict, collate=as_dict, eval_data=dataset())
    result = pl.train(job, protocol=pl.bsp(), cluster=pl.Cluster(2), stop=pl.Stop(updates=20), seed=3)
    pairs = trained(eval_data=dataset())
    assert torch.equal(parameters_of(result.model), parameters_of(pairs.model))
    assert result.metrics == pytest.approx(pairs.metrics)


class Branches(nn.Module):
    """Uses its second branch in the first call only."""

    def __init__(self):
        super().__init__()
        self.always, self.once = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.always(x) + (self.once(x) if self.calls == 1 else 0)


def test_unused_parameters_have_a_gradient_of_zero():
    replica, server = pieces(tiny_job(model=Branches))
    version, gradient = replica.layout.allocate(), replica.layout.allocate()
    server.publish(version)
    replica.gradient(0, 1, None, version, gradient)
    assert all((view != 0).any() for view in gradient.parameters)
    replica.gradient(0, 2, None, version, gradient)
    assert [bool((view != 0).any()) for view in gradient.parameters] == [True, True, False, False]


def test_an_optimizer_that_writes_into_gradients_leaves_unused_ones_zero():
    nesterov = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    replica, server = pieces(tiny_job(model=Branches, optimizer=nesterov))
    version, gradient = replica.layout.allocate(), replica.layout.allocate()
    for draw in (1, 2, 3):
        server.publish(version)
        replica.gradient(0, draw, None, version, gradient)
        unused = gradient.parameters[2:]
        assert draw == 1 or all((view == 0).all() for view in unused)
        server.enqueue(gradient, weight=8)
        server.apply(update_of(1))


def test_evaluation_leaves_every_module_in_its_own_mode():
    job = tiny_job(eval_data=dataset())
    model = build_model(job, 0)
    model[1].eval()
    evaluate(job, model, seed=0)
    assert [module.training for module in model] == [True, False, True]


def test_the_result_holds_no_gradients():
    assert all(parameter.grad is None for parameter in trained().model.parameters())
