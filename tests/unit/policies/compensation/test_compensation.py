"""Compensation of stale gradients, against the formulas of the papers."""

from dataclasses import dataclass
from functools import partial
from math import inf, sqrt
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.core.records import GradientArrived
from paceline.policies.compensation.base import apply_compensators
from paceline.policies.compensation.delay import DCASGD, DCS3GD
from paceline.policies.compensation.step_scale import WEIGHTS, StalenessLR, StalenessWeight
from paceline.tensors.stale_arithmetic import BlockArithmetic
from paceline.tensors.stale_vectors import StaleVectors
from stale_vectors import SIZES, delayed, trained, vectors
from tiny_jobs import dataset, largest_relative_difference, parameters_of, small_net

ALL = [
    StalenessLR(C=0.1),
    StalenessLR(error_floor=0.1),
    *map(StalenessWeight, WEIGHTS),
    DCASGD(lambda0=0.04),
    DCASGD(lambda0=2, m=0.95),
    DCS3GD(),
]


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


@pytest.mark.slow
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


class OnePass(BlockArithmetic):
    """Arithmetic without a pass for the distance alone."""

    def squared_distance(self, now, then):
        raise AssertionError


def test_a_chain_measures_the_distance_in_the_pass_of_the_correction():
    scale, correction = StalenessLR(C=1e-3), DCASGD(lambda0=0.3)
    facts = {"staleness": 3, "learning_rate": 0.1, "squared_norm": 1.0}
    chained = StaleVectors(**facts, gradient=vectors(0), now=vectors(1), then=vectors(2), arithmetic=OnePass())
    factors = apply_compensators(pl.plans.chain(scale, correction), chained, lambda _: {})
    alone = StaleVectors(**facts, gradient=vectors(0), now=vectors(1), then=vectors(2))
    assert factors == pytest.approx([scale.compensate(alone, {}), 0.3], rel=1e-12)
    assert_close(chained.gradient, corrected_by(correction))


@dataclass(frozen=True, repr=False)
class Sum(pl.plans.Compensator):
    """Scale that reads the gradient."""

    name: ClassVar[str] = "sum"
    kind: ClassVar[str] = "scale"
    formula: ClassVar[str] = "1 + |sum of g|"

    def compensate(self, stale, memory):
        return 1 + abs(float(joined(stale.gradient).sum()))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_scale_that_reads_the_gradient_is_computed_in_its_place(is_first):
    correction, stale = DCASGD(lambda0=0.3), delayed()
    parts = [Sum(), correction] if is_first else [correction, Sum()]
    factors = apply_compensators(parts, stale, lambda _: {})
    read = vectors(0) if is_first else corrected_by(correction)
    assert factors[parts.index(Sum())] == 1 + abs(float(joined(read).sum()))


def corrected_by(correction):
    stale = delayed()
    correction.compensate(stale, {})
    return stale.gradient


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


class Unfinished(pl.plans.Compensator):
    """Neither a dataclass nor of any kind."""

    name = "unfinished"
    formula = "?"

    def compensate(self, delayed, memory):
        return 1.0


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
        (lambda: pl.plans.chain(pl.dc_s3gd(), "dc_s3gd"), "expected a pl.plans.Compensator"),
        (lambda: pl.staleness_weight(lambda tau: 2.0), "at staleness 0"),
        (lambda: pl.staleness_weight(lambda tau: 1.0 - tau).weight(1), "expected a weight > 0"),
        (lambda: pl.staleness_weight(weighting=3), "expected text or a function"),
    ],
)
def test_invalid_input_is_refused(make, message):
    with pytest.raises(pl.UsageError, match=message):
        make()


def test_a_plan_with_compensators_equals_its_text():
    plan = pl.bsp().until(0.25) >> pl.k_async(k=2) + pl.plans.chain(
        pl.staleness_lr(C=5e-5), pl.dc_asgd(lambda0=2, m=0.95)
    )
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
