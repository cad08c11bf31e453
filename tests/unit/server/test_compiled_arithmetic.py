"""Delay compensation in compiled loops: the corrections of torch, and its sums to rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies.compensation.stale_arithmetic import BlockArithmetic
from paceline.server import compiled_arithmetic
from paceline.server.compiled_arithmetic import CompiledArithmetic, stale_arithmetic

compiled = pytest.importorskip("paceline.server.compiled")
LENGTHS = st.sampled_from([0, 1, 31, 33, 2048, 2049, 70_001])
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])


@pytest.fixture(scope="module", autouse=True)
def _compiled_before():
    """Compile outside of the time of a test."""
    for dtype in (torch.float32, torch.float64):
        vector = torch.zeros(1, dtype=dtype)
        CompiledArithmetic(compiled).squared_distance(vector, vector)
        CompiledArithmetic(compiled).squared_length(vector, vector, vector, 1.0)
        CompiledArithmetic(compiled).correct(vector, vector, vector, 1.0)


def vectors_of(length, dtype, offset):
    random = torch.Generator().manual_seed(length)
    return [torch.randn(length + offset, generator=random, dtype=dtype)[offset:] for _ in range(3)]


@DTYPES
@given(length=LENGTHS, offset=st.integers(0, 3))
def test_the_loops_correct_and_sum_as_torch(dtype, tolerance, length, offset):
    (g, now, then), (other, _, _) = (vectors_of(length, dtype, offset) for _ in range(2))
    ours, theirs = CompiledArithmetic(compiled), BlockArithmetic()
    assert ours.squared_distance(now, then) == pytest.approx(theirs.squared_distance(now, then), rel=tolerance)
    ours_length, length_ = (each.squared_length(g, now, then, 3.0) for each in (ours, theirs))
    assert ours_length == pytest.approx(length_, rel=tolerance)
    norm, its = ours.correct(g, now, then, 0.3), theirs.correct(other, now, then, 0.3)
    assert torch.equal(g, other)
    assert norm == pytest.approx(its, rel=tolerance)


def test_sums_of_small_values_do_not_underflow():
    small = torch.full((70_001,), 1e-25)
    distance = CompiledArithmetic(compiled).squared_distance(small, torch.zeros_like(small))
    assert distance == pytest.approx(70_001e-50, rel=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_in_the_norm(value):
    g, now, then = vectors_of(5000, torch.float32, 0)
    g[4321] = value
    norm = CompiledArithmetic(compiled).correct(g, now, then, 0.3)
    assert not norm < float("inf")


def test_short_vectors_and_other_dtypes_have_the_arithmetic_of_torch(monkeypatch):
    assert isinstance(stale_arithmetic([torch.zeros(3)]), BlockArithmetic)
    monkeypatch.setattr(compiled_arithmetic, "LEAST", 1)
    assert isinstance(stale_arithmetic([torch.zeros(3)]), CompiledArithmetic)
    assert isinstance(stale_arithmetic([torch.zeros(3), torch.zeros(3).bfloat16()]), BlockArithmetic)
