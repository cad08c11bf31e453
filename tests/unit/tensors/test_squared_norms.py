"""Squared norms of vectors against sums in double precision."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors.squared_norms import PIECE, copy_with_squared_norm, squared_norm, squared_norm_of
from selections import parametrize_few

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


def summed(vectors):
    return sum(float(each.to(torch.complex128).abs().square().sum()) for each in vectors)


@parametrize_few("dtype", DTYPES, keep=1)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 7, PIECE, PIECE + 3]), max_size=3),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 1e25]),
)
def test_norms_of_several_vectors_are_those_in_double_precision(dtype, lengths, scale):
    random = torch.Generator().manual_seed(len(lengths))
    vectors = [(torch.randn(length, generator=random) * scale).to(dtype) for length in lengths]
    assert squared_norm_of(vectors) == pytest.approx(summed(vectors), rel=1e-5)


def test_rounding_errors_do_not_add_up_over_ten_million_elements():
    vector = torch.full((10_000_000,), 0.1)
    assert squared_norm_of([vector]) == pytest.approx(
        1e7 * float(vector[0]) ** 2, rel=3e-5
    )  # the worst case: all roundings go one way


@parametrize_few("dtype", DTYPES, keep=2)
@given(
    rows=st.sampled_from([0, 1, 3, PIECE // 8, PIECE // 8 + 3, PIECE // 2 + 1]),
    offset=st.integers(0, 3),
    scale=st.sampled_from([1e-30, 1.0, 1e25]),
    is_strided=st.booleans(),
)
def test_a_copy_is_measured_with_the_bits_of_its_own_norm(dtype, rows, offset, scale, is_strided):
    random = torch.Generator().manual_seed(rows)
    values = (torch.randn(8, rows, generator=random) * scale).to(dtype)
    source = values.T if is_strided else values.T.contiguous()
    target = torch.empty(8 * rows + offset, dtype=dtype)[offset:].view(rows, 8)
    norm = copy_with_squared_norm(source, target)
    assert torch.equal(target, source)
    assert float(norm) == float(squared_norm(target))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_in_the_norm(value):
    vector = torch.zeros(PIECE + 1)
    vector[PIECE] = value
    assert not squared_norm_of([vector]) < float("inf")


def test_views_of_any_shape_and_stride_are_measured():
    square = torch.arange(12.0).reshape(3, 4)
    assert float(squared_norm(square.T)) == float(squared_norm(square)) == 506.0
