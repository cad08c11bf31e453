"""Delay compensation in compiled loops: the corrections of torch, and its sums to rounding."""

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors import compiled_arithmetic
from paceline.tensors.compiled_arithmetic import CompiledArithmetic, stale_arithmetic
from paceline.tensors.stale_arithmetic import AdaptiveKnobs, BlockArithmetic

compiled = pytest.importorskip("paceline.tensors.compiled")
LENGTHS = st.sampled_from([0, 1, 31, 33, 2048, 2049, 70_001])
KNOBS = AdaptiveKnobs(m=0.9, epsilon=1e-7, lambda0=2.0)
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])


@pytest.fixture(scope="module", autouse=True)
def _compiled_before():
    """Compile outside of the time of a test."""
    for dtype in (torch.float32, torch.float64):
        vector = torch.zeros(1, dtype=dtype)
        CompiledArithmetic(compiled).squared_distance(vector, vector)
        CompiledArithmetic(compiled).squared_length(vector, vector, vector, 1.0)
        CompiledArithmetic(compiled).correct(vector, vector, vector, 1.0)
        CompiledArithmetic(compiled).correct_adaptively(vector, vector, vector, vector, KNOBS)


def vectors_of(length, dtype, offset):
    """Return g, w_now, w_then and a mean square, the same for each call."""
    random = torch.Generator().manual_seed(length)
    *vectors, mean_square = (torch.randn(length + offset, generator=random, dtype=dtype)[offset:] for _ in range(4))
    return [*vectors, mean_square.abs_()]


@DTYPES
@given(length=LENGTHS, offset=st.integers(0, 3))
def test_the_loops_correct_and_sum_as_torch(dtype, tolerance, length, offset):
    (g, now, then, square), (other, _, _, its_square) = (vectors_of(length, dtype, offset) for _ in range(2))
    ours, theirs = CompiledArithmetic(compiled), BlockArithmetic()
    assert ours.squared_distance(now, then) == pytest.approx(theirs.squared_distance(now, then), rel=tolerance)
    ours_length, length_ = (each.squared_length(g, now, then, 3.0) for each in (ours, theirs))
    assert ours_length == pytest.approx(length_, rel=tolerance)
    sums, its = ours.correct(g, now, then, 0.3), theirs.correct(other, now, then, 0.3)
    assert torch.equal(g, other)
    assert sums == pytest.approx(its, rel=tolerance)
    assert sums.squared_distance == pytest.approx(theirs.squared_distance(now, then), rel=tolerance)
    sums = ours.correct_adaptively(g, now, then, square, KNOBS)
    its = theirs.correct_adaptively(other, now, then, its_square, KNOBS)
    assert torch.equal(g, other)
    assert torch.equal(square, its_square)
    assert sums == pytest.approx(its, rel=tolerance)


def test_the_loops_overflow_as_torch():
    large = torch.full((70_001,), 1e20)
    for arithmetic in (CompiledArithmetic(compiled), BlockArithmetic()):
        assert arithmetic.squared_distance(large, torch.zeros_like(large)) == inf


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_in_the_norm(value):
    g, now, then, square = vectors_of(5000, torch.float32, 0)
    g[4321] = value
    adapted, ours = g.clone(), CompiledArithmetic(compiled)
    assert not ours.correct(g, now, then, 0.3).squared_norm < inf
    assert not ours.correct_adaptively(adapted, now, then, square, KNOBS).squared_norm < inf


def test_short_vectors_and_other_dtypes_have_the_arithmetic_of_torch(monkeypatch):
    assert isinstance(stale_arithmetic([torch.zeros(3)]), BlockArithmetic)
    monkeypatch.setattr(compiled_arithmetic, "LEAST", 1)
    assert isinstance(stale_arithmetic([torch.zeros(3)]), CompiledArithmetic)
    assert isinstance(stale_arithmetic([torch.zeros(3), torch.zeros(3).bfloat16()]), BlockArithmetic)
