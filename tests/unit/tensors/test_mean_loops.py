"""Running means in one pass: compiled loops have the bits of torch, and see what is not finite."""

from math import inf, isfinite, nan

import pytest
import torch

from loaded_loops import use_loops
from paceline.tensors import mean_loops
from paceline.tensors.mean_loops import exact_loops, move_mean, update_mean

DTYPES = [torch.float32, torch.float64]


def vectors(count, length, dtype):
    random = torch.Generator().manual_seed(count * length)
    scale = 10.0 ** torch.randint(-30, 30, [length], generator=random)
    return [(torch.randn(length, generator=random) * scale).to(dtype) for _ in range(count)]


@pytest.fixture
def all_in_loops(monkeypatch):
    pytest.importorskip("numba")
    use_loops(monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("begins", [True, False])
def test_loops_have_the_bits_of_torch(dtype, begins, all_in_loops):
    assert exact_loops(dtype) is not None
    for count in (1, 2, 4, 5, 9):
        for length in (1, 17, 5_003, 2**17 + 3):
            mean, *new = vectors(count + 1, length, dtype)
            weights = [1.0 if begins else 0.7, *(0.9 / (number + 1) for number in range(1, count))]
            theirs = mean.clone()
            update_mean(theirs, new, weights)
            assert isfinite(move_mean(mean, new, weights))
            assert torch.equal(mean, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_one_element_that_is_not_finite_is_seen_wherever_it_is(dtype, value, all_in_loops):
    for count in (1, 4, 6):
        for place in (0, 4_999, 5_002):
            for guilty in range(count):
                mean, *new = vectors(count + 1, 5_003, dtype)
                new[guilty][place] = value
                assert not isfinite(move_mean(mean, new, [0.5, *[0.25] * (count - 1)]))


def test_the_mean_of_the_largest_numbers_is_finite(all_in_loops):
    for dtype in DTYPES:
        largest = torch.full([5_003], torch.finfo(dtype).max, dtype=dtype)
        assert isfinite(move_mean(torch.zeros_like(largest), [largest, largest], [1.0, 0.5]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_other_dtypes_are_left_to_torch(dtype):
    mean = torch.ones(2**18, dtype=dtype)
    assert isfinite(move_mean(mean, [torch.full_like(mean, 2.0)], [0.5]))
    assert torch.equal(mean, torch.full_like(mean, 1.5))


def test_torch_computes_where_numba_is_not_installed(monkeypatch):
    monkeypatch.setattr(mean_loops, "loops_for", lambda dtype: None)
    assert exact_loops.__wrapped__(torch.float32) is None
