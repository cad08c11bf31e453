"""What is done about stale gradients, against the formulas written down plainly."""

import json
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.core.records import GradientArrived, UpdateMade
from paceline.policies.compensation.base import BLOCK, StaleGradient
from paceline.policies.compensation.delay import DCASGD, DCS3GD
from paceline.policies.compensation.step_scale import WEIGHTS, StalenessLR, StalenessWeight
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from selections import each_value_once
from tiny_jobs import batch_norm_net, dataset, largest_relative_difference, parameters_of, sgd, small_net, tiny_job

SIZES = (BLOCK + 7, 3)  # of two flat vectors: more than a block, and less
ALL = [
    StalenessLR(C=0.1),
    StalenessLR(error_floor=0.1),
    *map(StalenessWeight, WEIGHTS),
    DCASGD(lambda0=0.04),
    DCASGD(lambda0=2, m=0.95),
    DCS3GD(),
]


def vectors(seed, dtype=torch.float64):
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=drawn, dtype=torch.float64).to(dtype) for size in SIZES]


def delayed(staleness=3, learning_rate=0.5, g=None, now=None, then=None):
    g = g or vectors(0)
    squared_norm = sum(float((each.double() ** 2).sum()) for each in g)
    return StaleGradient(staleness, learning_rate, squared_norm, g, now or vectors(1), then or vectors(2))


def joined(flats):
    return torch.cat([flat.double() for flat in flats])


def assert_close(ours, expected, relative=1e-12):
    assert largest_relative_difference(joined(ours), joined(expected)) < relative


@pytest.mark.parametrize("compensator", ALL, ids=repr)
def test_a_fresh_gradient_is_never_changed(compensator):
    fresh = delayed(staleness=0, now=vectors(1), then=vectors(1))
    factor = compensator.compensate(fresh, {})
    assert all(map(torch.equal, fresh.gradient, vectors(0)))
    assert factor == (1.0 if compensator.kind == "scale" else 0.0)


@pytest.mark.parametrize("compensator", ALL, ids=repr)
def test_a_stale_gradient_is_changed(compensator):
    stale = delayed()
    factor = compensator.compensate(stale, {})
    if compensator.kind == "scale":
        assert 0 < factor < 1
        assert all(map(torch.equal, stale.gradient, vectors(0)))
    else:
        assert factor > 0
        assert not any(map(torch.equal, stale.gradient, vectors(0)))


@pytest.mark.parametrize("compensator", ALL, ids=repr)
def test_unchanged_parameters_leave_only_the_staleness_scale(compensator):
    stale = delayed(now=vectors(1), then=vectors(1))
    factor = compensator.compensate(stale, {})
    assert all(map(torch.equal, stale.gradient, vectors(0)))
    assert factor in (1.0, 0.0, getattr(compensator, "lambda0", None)) or isinstance(compensator, StalenessWeight)


@given(C=st.floats(1e-6, 1e6), eta_max=st.floats(1e-4, 10))
def test_the_staleness_learning_rate_equals_equation_13(C, eta_max):
    stale = delayed(learning_rate=eta_max)
    distance = float(((joined(vectors(1)) - joined(vectors(2))) ** 2).sum())
    eta = eta_max * StalenessLR(C=C).compensate(stale, {})
    assert eta == pytest.approx(min(C / distance, eta_max), rel=1e-9)


@pytest.mark.parametrize("explosion", [inf, float("nan"), 1e200])
def test_an_overflowing_distance_gives_the_smallest_step(explosion):
    now = [torch.full((size,), explosion, dtype=torch.float64) for size in SIZES]
    assert 0 < StalenessLR(C=1.0).compensate(delayed(now=now), {}) < 1e-300


def test_staleness_weights_equal_their_formulas():
    for tau in range(10):
        assert StalenessWeight().weight(tau) == 1 / (1 + tau)
        assert StalenessWeight("1/sqrt(1+tau)").weight(tau) == 1 / sqrt(1 + tau)
        assert StalenessWeight("1/(1+sqrt(tau))").weight(tau) == 1 / (1 + sqrt(tau))


def test_constant_delay_compensation_equals_its_formula():
    stale, (g, now, then) = delayed(), map(vectors, (0, 1, 2))
    DCASGD(lambda0=0.3).compensate(stale, {})
    assert_close(stale.gradient, [a + 0.3 * a * a * (b - c) for a, b, c in zip(g, now, then, strict=True)])


def test_adaptive_delay_compensation_divides_by_the_moving_root_mean_square_of_all_gradients():
    compensator, memory = DCASGD(lambda0=2, m=0.9, epsilon=1e-3), {}
    mean_square = [torch.zeros(size).double() for size in SIZES]
    for step, staleness in enumerate([2, 0, 5]):
        g, now, then = (vectors(10 * step + i) for i in range(3))
        stale = delayed(staleness, g=[each.clone() for each in g], now=now, then=then)
        compensator.compensate(stale, memory)
        mean_square = [0.9 * old + 0.1 * each**2 for old, each in zip(mean_square, g, strict=True)]
        moved = [b - c if staleness else 0 * b for b, c in zip(now, then, strict=True)]
        parts = zip(g, moved, mean_square, strict=True)
        assert_close(stale.gradient, [a + 2 / (square + 1e-3).sqrt() * a * a * d for a, d, square in parts])


def test_the_correction_of_dc_s3gd_has_lambda0_times_the_norm_of_the_gradient():
    stale, (g, now, then) = delayed(), map(vectors, (0, 1, 2))
    lambda_ = DCS3GD(lambda0=0.2).compensate(stale, {})
    added = joined(stale.gradient) - joined(g)
    assert float(added.norm()) == pytest.approx(0.2 * float(joined(g).norm()), rel=1e-12)
    assert_close(stale.gradient, [a + lambda_ * a * a * (b - c) for a, b, c in zip(g, now, then, strict=True)])


def test_small_gradients_do_not_underflow_in_dc_s3gd():
    tiny = [each.float() * 1e-9 for each in vectors(0)]
    now, then = ([each.float() * 1e-9 for each in vectors(seed)] for seed in (1, 2))
    stale = delayed(g=[each.clone() for each in tiny], now=now, then=then)
    DCS3GD(lambda0=0.2).compensate(stale, {})
    assert float((joined(stale.gradient) - joined(tiny)).norm()) == pytest.approx(
        0.2 * float(joined(tiny).norm()), 1e-3
    )


@pytest.mark.parametrize("compensator", ALL, ids=repr)
def test_half_precision_is_compensated_without_overflow(compensator):
    g, now, then = (vectors(seed, torch.float16) for seed in range(3))
    stale = delayed(g=g, now=[each * 100 for each in now], then=then)
    assert 0 < compensator.compensate(stale, {}) < inf
    assert all(each.isfinite().all() for each in stale.gradient)


# --- in a run ---------------------------------------------------------------------------------------------


def trained(protocol, **changes):
    stop = pl.Stop(updates=25)
    return pl.train(tiny_job(**changes), protocol=protocol, cluster=pl.Cluster(4), stop=stop, seed=3)


class Literal:
    """Stale SGD written down plainly, in the order of a run's own arrivals, with all versions kept."""

    def __init__(self, job, result, scales_gradient):
        self.job, self.history, self.scales_gradient = job, result.history, scales_gradient
        self.model = build_model(job, 3)
        self.optimizer = job.optimizer(self.model.parameters())
        self.loader = MinibatchLoader(job, 3, 4)

    def run(self, scale, correct):
        versions, held = [parameters_of(self.model)], []
        for record in self.history:
            if isinstance(record, GradientArrived) and record.used:
                then, now = versions[record.version], versions[-1]
                g = correct(self.gradient(record, then), now, then)
                held.append((g, scale(record.staleness, now, then, self.optimizer.param_groups[0]["lr"])))
            elif isinstance(record, UpdateMade):
                self.step(held, versions[-1])
                versions.append(parameters_of(self.model))
                held = []
        return versions[-1]

    def gradient(self, record, at):
        nn.utils.vector_to_parameters(at.clone(), self.model.parameters())
        inputs, target = self.loader.batch(record.worker, record.draw, None)
        loss = self.job.loss(self.model(inputs), target)
        return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(self.model.parameters())))

    def step(self, held, at):
        nn.utils.vector_to_parameters(at.clone(), self.model.parameters())
        k, total = len(held), sum(scale for _, scale in held)
        g = sum(scale * g for g, scale in held) / (k if self.scales_gradient else total)
        start = 0
        for parameter in self.model.parameters():
            parameter.grad = g[start : start + parameter.numel()].view_as(parameter).clone()
            start += parameter.numel()
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.param_groups[0]["lr"] = lr if self.scales_gradient else lr * total / k
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] = lr


def unscaled(tau, now, then, lr):
    return 1.0


def uncorrected(g, now, then):
    return g


def eq_13(tau, now, then, lr):
    distance = float(((now - then) ** 2).sum())
    return min(0.002 / distance, lr) / lr if distance else 1.0


RULES = {
    "staleness_lr(C=0.002)": (eq_13, uncorrected),
    "staleness_weight": (lambda tau, now, then, lr: 1 / (1 + tau), uncorrected),
    "dc_asgd(lambda0=0.5)": (unscaled, lambda g, now, then: g + 0.5 * g * g * (now - then)),
    "staleness_lr(C=0.002) + dc_asgd(lambda0=0.5)": (eq_13, lambda g, now, then: g + 0.5 * g * g * (now - then)),
}
OPTIMIZERS = {
    "momentum": (sgd(momentum=0.9), True),
    "adam": (partial(torch.optim.Adam, lr=0.05), False),
}


@pytest.mark.parametrize("protocol", ["asp", "k_async(k=3)"])
@pytest.mark.parametrize(("rule", "optimizer"), each_value_once(list(RULES), list(OPTIMIZERS)))
def test_a_run_equals_a_plain_loop_of_stale_sgd(rule, protocol, optimizer):
    make, scales_gradient = OPTIMIZERS[optimizer]
    result = trained(f"{protocol} + {rule}", optimizer=make)
    assert any(record.staleness for record in result.history.of(GradientArrived))
    plain = Literal(tiny_job(optimizer=make), result, scales_gradient).run(*RULES[rule])
    assert largest_relative_difference(parameters_of(result.model), plain) < 1e-9
    without = trained(protocol, optimizer=make)
    assert largest_relative_difference(parameters_of(result.model), parameters_of(without.model)) > 1e-4


def test_the_record_of_each_gradient_has_formula_and_factor():
    result = trained("asp + staleness_weight + dc_asgd(lambda0=0.5)")
    for record in result.history.of(GradientArrived):
        (first, weight), (second, lambda_) = record.compensations
        assert (first, second) == ("1/(1+tau)", "g + lambda g g (w_now - w_then)")
        assert weight == record.step_scale == 1 / (1 + record.staleness)
        assert lambda_ == (0.5 if record.staleness else 0)
    scales = [record.step_scale for record in result.history.of(GradientArrived) if record.used]
    assert [update.step_scale for update in result.history.of(UpdateMade)] == scales


def first_frozen(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.0}, {"params": others, "lr": 0.1}])


def test_eta_max_is_the_rate_of_the_trainable_parameters():
    result = trained("asp + staleness_lr(C=1e-6)", optimizer=first_frozen)
    assert min(record.step_scale for record in result.history.of(GradientArrived)) < 0.1


def test_compensation_does_not_change_the_average_of_buffers():
    plain = trained("k_async(k=3)", model=batch_norm_net, optimizer=sgd(lr=0.0))
    scaled = trained("k_async(k=3) + staleness_weight", model=batch_norm_net, optimizer=sgd(lr=0.0))
    for ours, theirs in zip(scaled.model.buffers(), plain.model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_synchronous_phase_has_no_compensation():
    plain, compensated = trained("bsp@updates=10 >> asp"), trained("bsp@updates=10 >> asp + staleness_weight")
    first = [record for record in compensated.history.of(GradientArrived) if record.now_s < 10]
    assert first[0].compensations == []
    assert not torch.equal(parameters_of(plain.model), parameters_of(compensated.model))


@dataclass(frozen=True, repr=False)
class Halved(pl.Compensator):
    """A rule of the user's own."""

    name: ClassVar = "halved"
    kind: ClassVar = "scale"
    formula: ClassVar = "1/2 if stale"

    def compensate(self, delayed, memory):
        return 0.5 if delayed.staleness else 1.0


def test_a_user_defined_compensator_is_applied():
    result = trained(pl.asp() + Halved())
    for record in result.history.of(GradientArrived):
        assert record.compensations == [("1/2 if stale", record.step_scale)]
        assert record.step_scale == (0.5 if record.staleness else 1.0)


@dataclass(frozen=True, repr=False)
class Given(Halved):
    """Whatever it is told."""

    factor: object = 1.0

    def compensate(self, delayed, memory):
        return self.factor if delayed.staleness else 1.0


@pytest.mark.parametrize("factor", [0.0, -1.0, inf, float("nan"), None, "half"])
def test_an_invalid_scale_is_refused(factor):
    with pytest.raises(pl.UsageError, match=r"the step scale of halved=.* is not a number in"):
        trained(pl.k_async(k=2) + Given(factor))


def test_scales_with_an_underflowing_product_leave_a_step():
    rules = pl.chain(Given(1e-200), pl.staleness_weight(lambda tau: 1.0 if tau == 0 else 1e-200))
    result = trained(pl.k_async(k=2) + rules)
    assert min(record.step_scale for record in result.history.of(GradientArrived)) > 0
    assert parameters_of(result.model).isfinite().all()


class Unfinished(pl.Compensator):
    """Neither a dataclass nor of any kind."""

    name = "unfinished"
    formula = "?"

    def compensate(self, delayed, memory):
        return 1.0


def weight_of_my_own(tau):
    return 1 / (1 + tau) ** 2


def test_a_user_defined_function_keeps_its_name_in_every_process():
    assert repr(pl.staleness_weight(weight_of_my_own)) == "staleness_weight(weighting=weight_of_my_own)"


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, "gradient"),
        ({"clip_norm": 1.0}, "learning rate"),
        ({"optimizer": partial(torch.optim.Adam, lr=0.01)}, "learning rate"),
    ],
)
def test_a_run_records_whether_gradient_or_learning_rate_is_scaled(changes, part, tmp_path):
    job, out = tiny_job(**changes), tmp_path / "run"
    pl.train(job, protocol="asp + staleness_weight", cluster=pl.Cluster(2), stop="updates=3", out=out)
    assert json.loads((out / "run.json").read_text())["step_scale"] == f"multiplies the {part}"


@pytest.mark.parametrize(
    ("protocol", "changes", "message"),
    [
        ("bsp + staleness_weight", {}, "no gradient of bsp is ever stale"),
        ("dbw(base=k_async) + dc_s3gd", {}, "leave one of the two out"),
        ("asp + staleness_weight", {"optimizer": torch.optim.Rprop}, "Rprop steps by the signs"),
        ("asp + staleness_lr", {}, "neither C nor error_floor"),
        ("asp + staleness_lr(C=1, error_floor=1)", {}, "one of the two"),
        ("asp + staleness_lr(C=0)", {}, "C=0 is not a number in"),
        ("asp + dc_asgd(lambda0=-1)", {}, "lambda0=-1 is not a number in"),
        ("asp + dc_asgd(lambda0=1, m=1)", {}, "m=1 is not a number in"),
        ("asp + dc_asgd(lambda0=1) + dc_s3gd", {}, "would both correct"),
        ("asp + dc_s3gd + dc_s3gd", {}, "dc_s3gd is given twice"),
        ("asp + staleness_weight(weighting='1/tau')", {}, r"weighting='1/tau', expected '1/\(1\+tau\)', '1/sqrt"),
        ("asp + staleness_weight", {"optimizer": torch.optim.ASGD}, "ASGD computes the learning rate of a step in"),
        ("asp + stalenes_lr(C=1)", {}, "staleness_lr"),
        ("asp + bsp", {}, "'bsp' is not known"),
    ],
)
def test_invalid_combinations_are_refused_with_the_reason(protocol, changes, message):
    with pytest.raises(pl.UsageError, match=message):
        trained(protocol, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pl.asp() + 0.5, "cannot be added to asp; expected a compensator"),
        (lambda: pl.asp() + Unfinished(), "Unfinished is incomplete"),
        (lambda: pl.chain(pl.dc_s3gd(), "dc_s3gd"), "expected a pl.Compensator"),
        (lambda: pl.staleness_weight(lambda tau: 2.0), "at staleness 0"),
        (lambda: pl.staleness_weight(lambda tau: 1.0 - tau).weight(1), "expected a weight > 0"),
        (lambda: pl.staleness_weight(weighting=3), "expected text or a function"),
    ],
)
def test_invalid_input_is_refused(make, message):
    with pytest.raises(pl.UsageError, match=message):
        make()


def test_a_plan_with_compensators_equals_its_text():
    plan = pl.bsp().until(0.25) >> pl.k_async(k=2) + pl.chain(pl.staleness_lr(C=5e-5), pl.dc_asgd(lambda0=2, m=0.95))
    text = "bsp@25% >> k_async(k=2) + staleness_lr(C=5e-05) + dc_asgd(lambda0=2, m=0.95)"
    assert parse_plan(text) == plan
    assert str(plan) == text.replace("@25%", " until 0.25 of the workload")


def test_a_gradient_with_an_overflowing_correction_is_dropped():
    result = trained(
        pl.asp() + pl.dc_asgd(lambda0=1e30), model=partial(small_net, torch.float32), data=dataset(dtype=torch.float32)
    )
    dropped = [record for record in result.history.of(GradientArrived) if not record.used]
    assert dropped
    assert {record.reason for record in dropped} == {"not finite"}
    assert all(record.staleness for record in dropped)
    assert parameters_of(result.model).isfinite().all()
