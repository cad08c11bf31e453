"""Limits of the shares: memory, and few sizes for a compiler."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.codec import decode, encode
from paceline.policies.share_limits import MOST_SIZES, ShareLimits, longest, of_few_sizes
from paceline.policies.shares import USED_MEMORY, Pieces, ShareBalancer, deal

SECONDS = st.floats(0.01, 100)
SIZES = st.builds(Pieces, st.integers(1, 40), st.integers(1, 20), st.floats(1, 3))
B = Pieces(16, pieces=8)


def allowed(sizes, most):
    return range(sizes.fewest, most + 1, sizes.size)


@given(SIZES, st.integers(1, 200), st.floats(1, 1e12), st.floats(1, 1e12))
def test_a_limit_is_an_allowed_size_one_piece_above_the_largest_at_most(sizes, largest, peak, memory):
    most = sizes.fitting(largest, peak, memory)
    assert sizes.batch_size <= most <= sizes.most
    assert (most - sizes.batch_size) % sizes.size == 0
    assert most <= max(largest, sizes.batch_size) + sizes.size
    assert most == sizes.batch_size or peak * most / largest <= USED_MEMORY * memory * (1 + 1e-9)


@given(SIZES, st.floats(0, 1), st.floats(0, 0.2))
def test_a_device_is_never_filled_beyond_nine_tenths_by_more_than_equal_shares(sizes, fixed, of_sample):
    """Memory of a device of size 1: a fixed part, and one for each sample."""
    largest, peaks = sizes.batch_size, []
    for _ in range(100):
        peaks.append(fixed + of_sample * largest)
        most = sizes.fitting(largest, max(peaks[-1], 1e-9), 1.0)
        if most <= largest:
            break
        assert most == largest + sizes.size
        largest = most
    assert all(peak <= USED_MEMORY + 1e-9 for peak in peaks[1:])
    assert largest == sizes.most or peaks[-1] * (largest + sizes.size) / largest > USED_MEMORY - 1e-9


@given(st.lists(SECONDS, min_size=2, max_size=4), st.integers(1, 12), st.integers(1, 4), st.data())
def test_no_other_division_within_the_limits_ends_earlier(seconds, batch_size, pieces, data):
    sizes = Pieces(batch_size, pieces, 2.0)
    most = [data.draw(st.sampled_from(range(batch_size, sizes.most + 1, sizes.size))) for _ in seconds]
    shares = deal(seconds, sizes, most)
    choices = product(*(allowed(sizes, limit) for limit in most))
    total = len(seconds) * batch_size
    assert sum(shares) == total
    assert all(share in allowed(sizes, limit) for share, limit in zip(shares, most, strict=True))
    assert longest(shares, seconds) == min(longest(each, seconds) for each in choices if sum(each) == total)


def decided(policy, seconds):
    return policy.decide(policy.shares, [share * each for share, each in zip(policy.shares, seconds, strict=True)])


def test_shares_rise_with_the_limit_and_fall_with_it():
    policy = ShareBalancer(4, B)
    found = []
    for most in (16, 16, 18, 20, 22, 18):
        policy.limits = ShareLimits((most, most, most, B.most))
        decided(policy, (1.0, 1.0, 1.0, 4.0))
        found.append(policy.shares[:3])
    assert found == [(16,) * 3, (16,) * 3, (18,) * 3, (20,) * 3, (20, 20, 20), (18,) * 3]


@given(st.lists(st.lists(SECONDS, min_size=3, max_size=3), min_size=20, max_size=60))
def test_under_a_compiler_a_rank_has_six_sizes_at_most(updates):
    policy, sizes = ShareBalancer(3, Pieces(40, pieces=40)), [set(), set(), set()]
    policy.limits = ShareLimits((60,) * 3, is_compiled=True)
    for seconds in updates:
        decided(policy, seconds)
        assert sum(policy.shares) == 120
        for seen, share in zip(sizes, policy.shares, strict=True):
            seen.add(share)
            assert len(seen) <= MOST_SIZES


def test_of_the_sizes_that_a_compiler_knows_the_best_are_taken():
    used = [(16, 16), *((16 + each, 16 - each) for each in range(1, 6))]
    assert of_few_sizes((22, 10), used, (1.0, 2.0), (24, 24)) == (21, 11)
    assert of_few_sizes((22, 10), used, (1.0, 2.0), (18, 24)) == (18, 14)
    assert of_few_sizes((10, 22), used, (2.0, 1.0), (24, 24)) == (16, 16)
    assert of_few_sizes((22, 10), used[:-1], (1.0, 2.0), (24, 24)) == (22, 10)


def test_a_saved_policy_keeps_the_sizes_that_a_compiler_knows():
    draws = np.random.default_rng(0)
    times = [np.exp(draws.standard_normal(3)) for _ in range(60)]
    whole, resumed = (ShareBalancer(3, Pieces(40, pieces=40)) for _ in range(2))
    whole.limits = resumed.limits = ShareLimits((60,) * 3, is_compiled=True)
    for seconds in times[:30]:
        decided(whole, seconds)
    resumed.load_state_dict(decode(encode(whole.state_dict(), {}), {}))
    found = [[decided(policy, seconds) for seconds in times[30:]] for policy in (whole, resumed)]
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [1, 5])
def test_shares_that_were_used_are_not_counted_twice(count):
    used = [(16, 16), (18, 14)]
    assert of_few_sizes((18, 14), used * count, (1.0, 2.0), (24, 24)) == (18, 14)
