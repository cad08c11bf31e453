"""Checksums of tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors.checksums import checksum
from paceline.tensors.squared_norms import PIECE

SIZES = [1, 2, 7, 1000, PIECE, PIECE + 1, 3 * PIECE + 5]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


def of(size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_equal_tensors_have_equal_checksums_with_any_number_of_threads(size, dtype):
    tensor, threads = of(size, dtype), torch.get_num_threads()
    try:
        found = []
        for each in (1, 2):
            torch.set_num_threads(each)
            found.append(checksum(tensor))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_changes_that_keep_the_norm_or_most_elements_are_seen(size, dtype):
    tensor = of(size, dtype)
    before, last = checksum(tensor), size - 1
    tensor[last] = -tensor[last]
    assert not torch.equal(checksum(tensor), before), "one sign"
    tensor[last] = -tensor[last]
    assert torch.equal(checksum(tensor), before)
    assert not torch.equal(checksum(-tensor), before), "all signs"
    assert not torch.equal(checksum(1024 * tensor if dtype != torch.float16 else 8 * tensor), before), "scale"
    if size > 1:
        assert not torch.equal(checksum(tensor.flip(0)), before), "order"


@given(st.integers(2, 300), st.data())
def test_elements_that_are_exchanged_are_seen(size, data):
    tensor = of(size)
    i, j = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    other = tensor.clone()
    other[i], other[j] = tensor[j], tensor[i]
    assert torch.equal(checksum(other), checksum(tensor)) == (i == j)


def test_the_layout_in_memory_does_not_matter():
    tensor = of(12).view(3, 4)
    assert torch.equal(checksum(tensor.t()), checksum(tensor.t().contiguous()))
    assert torch.equal(checksum(of(0)), torch.tensor(0.0))
