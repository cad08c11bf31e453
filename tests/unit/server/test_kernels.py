"""Compiled loops: the bits of torch for vectors of any length, values, views and threads; torch where they differ."""

import sys
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loaded_loops import use_loops
from paceline.server import kernels
from paceline.server.accumulator import RunningMean
from paceline.server.optimizer_rules import AdamRule, SGDRule, StepVectors
from selections import parametrize_few

compiled = pytest.importorskip("paceline.tensors.compiled")

RULES = {
    "sgd": SGDRule(lr=0.1),
    "momentum": SGDRule(lr=0.1, momentum=0.9),
    "dampening": SGDRule(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": SGDRule(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": AdamRule(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, is_decoupled=False, count=1),
    "weight decay": AdamRule(lr=0.01, beta1=0.3, beta2=0.9, eps=1e-8, weight_decay=0.1, is_decoupled=False, count=7),
    "adamw": AdamRule(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, is_decoupled=True, count=100),
}
SPECIAL = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, 1.0])


@pytest.fixture(scope="module", autouse=True)
def _compiled_before():
    """Compile outside of the time of a test."""
    for kind in (SGDRule, AdamRule):
        for dtype in (torch.float32, torch.float64):
            assert kernels.exact_loops(kind, dtype) is compiled


def vectors_of(rule, length, k, factor, dtype, in_place=False, offset=0):
    """Return views of vectors that are the same for each call."""
    random = torch.Generator().manual_seed(length + k)
    made = [torch.randn(length + offset, generator=random, dtype=dtype)[offset:] for _ in range(k + 3)]
    parameters, *state = made[k:]
    state[1].abs_()
    states = 2 if isinstance(rule, AdamRule) else 1 if rule.momentum else 0
    weights = [1.0, *(float(each) for each in torch.rand(k - 1, generator=random))]
    new = parameters if in_place else torch.empty_like(parameters)
    return StepVectors(
        gradient=RunningMean(made[:k], weights, factor), parameters=parameters, new=new, state=state[:states]
    )


def changed(vectors):
    return [vectors.parameters, vectors.new, *vectors.state]


def assert_same_bits(ours, theirs):
    for one, other in zip(changed(ours), changed(theirs), strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        bits = torch.int32 if one.dtype == torch.float32 else torch.int64
        assert torch.equal(one.contiguous().view(bits)[~one.isnan()], other.contiguous().view(bits)[~other.isnan()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@parametrize_few("rule", RULES.values(), keep=3, ids=RULES)
@given(
    length=st.sampled_from([0, 1, 15, 2047, 2048, 2049, 5000, 70_001]),
    k=st.integers(1, 5),
    factor=st.sampled_from([1.0, 0.3]),
    in_place=st.booleans(),
    offset=st.integers(0, 3),
)
def test_the_loops_have_the_bits_of_torch(rule, dtype, length, k, factor, in_place, offset):
    ours, theirs = (vectors_of(rule, length, k, factor, dtype, in_place, offset) for _ in range(2))
    rule.step_compiled(ours, compiled)
    rule.step(theirs)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_loops_have_the_bits_of_torch_for_special_values(rule):
    ours, theirs = (vectors_of(rule, 5000, 3, 0.5, torch.float32) for _ in range(2))
    for vectors in (ours, theirs):
        for number, each in enumerate([*vectors.gradient.vectors, vectors.parameters, *vectors.state]):
            each[number :: 7 + number] = SPECIAL.repeat(len(each))[: len(each[number :: 7 + number])]
    rule.step_compiled(ours, compiled)
    rule.step(theirs)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_threads_change_no_bit(rule, monkeypatch):
    use_loops(monkeypatch)
    ours, theirs = (vectors_of(rule, 70_001, 3, 0.5, torch.float32) for _ in range(2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        kernels.step(rule, ours)
    finally:
        torch.set_num_threads(before)
    rule.step(theirs)
    assert_same_bits(ours, theirs)


class Other(SGDRule):
    """Rule whose loops differ from torch."""

    def step_compiled(self, vectors, loops):
        replace(self, lr=self.lr * (1 + 1e-6)).step(vectors)


def test_loops_that_differ_from_torch_are_not_used(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "_rules", lambda kind: iter([Other(lr=0.1)]))
    assert kernels.exact_loops.__wrapped__(Other, torch.float32) is None
    assert "differ from torch for torch.float32" in caplog.text


def test_without_numba_torch_steps(monkeypatch):
    monkeypatch.setitem(sys.modules, "paceline.tensors.compiled", None)
    monkeypatch.delattr(sys.modules["paceline.tensors"], "compiled", raising=False)
    assert kernels.loops_for.__wrapped__(torch.float32) is None


def test_other_dtypes_are_stepped_by_torch():
    assert kernels.exact_loops(SGDRule, torch.bfloat16) is None
