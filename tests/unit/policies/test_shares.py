"""Policy of the shares: which division ends first, and when a change is worth it."""

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.codec import decode, encode
from paceline.errors import UsageError
from paceline.policies.shares import Pieces, ShareBalancer, deal, even
from selections import parametrize_few

SECONDS = st.floats(0.01, 100)
SIZES = st.builds(Pieces, st.integers(1, 40), st.integers(1, 20), st.floats(1, 3))
B = Pieces(16, pieces=8)
SLOW_LAST = (1.0, 1.0, 1.0, 2.0)


def allowed(sizes, ranks):
    return list(range(sizes.fewest, sizes.most + 1, sizes.size)) if ranks > 1 else [sizes.batch_size]


def longest(shares, seconds):
    return max(share * each for share, each in zip(shares, seconds, strict=True))


def fed(policy, seconds, updates, samples=None):
    """Return the decisions on updates whose ranks take this long for a sample."""
    found = []
    for _ in range(updates):
        counts = samples or policy.shares
        decision = policy.decide(counts, [count * each for count, each in zip(counts, seconds, strict=True)])
        found += [decision.shares] if decision else []
    return found


@given(st.integers(1, 100), st.integers(1, 30), st.floats(1, 4))
def test_sizes_are_whole_pieces_around_the_batch(batch_size, pieces, max_share):
    sizes = Pieces(batch_size, pieces, max_share)
    assert 1 <= sizes.fewest <= sizes.size
    assert sizes.fewest <= batch_size <= sizes.most <= max_share * batch_size
    assert (batch_size - sizes.fewest) % sizes.size == 0 == (sizes.most - batch_size) % sizes.size
    assert sizes.most + sizes.size > max_share * batch_size * (1 - 1e-9)


@given(st.lists(SECONDS, min_size=1, max_size=8), SIZES)
def test_shares_are_allowed_sizes_and_make_up_the_batches(seconds, sizes):
    shares = deal(seconds, sizes)
    assert sum(shares) == len(seconds) * sizes.batch_size
    for share in shares:
        assert sizes.fewest <= share <= sizes.most
        assert (share - sizes.batch_size) % sizes.size == 0


@given(st.lists(SECONDS, min_size=2, max_size=4), st.integers(1, 12), st.integers(1, 4), st.floats(1, 2.5))
def test_no_other_division_ends_earlier(seconds, batch_size, pieces, max_share):
    sizes = Pieces(batch_size, pieces, max_share)
    total = len(seconds) * batch_size
    choices = product(allowed(sizes, len(seconds)), repeat=len(seconds))
    best = min(longest(shares, seconds) for shares in choices if sum(shares) == total)
    assert longest(deal(seconds, sizes), seconds) == best


@st.composite
def living_ranks(draw):
    """Return seconds, sizes and equal shares of ranks of which some, not all, are lost."""
    lives = draw(st.lists(st.booleans(), min_size=2, max_size=4).filter(any))
    sizes = Pieces(draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.floats(1, 2.5)))
    seconds = [draw(SECONDS) if each else 0.0 for each in lives]
    return seconds, sizes, even(len(lives) * sizes.batch_size, lives)


@given(living_ranks())
def test_no_other_division_among_the_living_ends_earlier(drawn):
    seconds, sizes, equal = drawn
    shares = deal(seconds, sizes, equal=equal)
    assert sum(equal) == sum(shares) == len(seconds) * sizes.batch_size
    steps = range(-sizes.batch_size * 4, sizes.batch_size * 4 + 1)
    choices = [
        [share for each in steps if 1 <= (share := least + each * sizes.size) <= max(sizes.most, least)]
        if least
        else [0]
        for least in equal
    ]
    assert all(share in allowed for share, allowed in zip(shares, choices, strict=True))
    best = min(longest(each, seconds) for each in product(*choices) if sum(each) == sum(equal))
    assert longest(shares, seconds) == best


def test_shares_follow_the_speeds_of_the_living():
    policy = ShareBalancer(4, B, even(64, [True, False, True, True]))
    assert policy.shares == (22, 0, 21, 21)
    assert fed(policy, (1.0, 0.0, 1.0, 2.0), updates=2) == [(24, 0, 23, 17)]
    assert fed(policy, (1.0, 0.0, 1.0, 1.0), updates=30)[-1] == (22, 0, 21, 21)


@given(SECONDS, st.integers(1, 12), SIZES)
def test_equal_speeds_have_equal_shares(seconds, ranks, sizes):
    assert deal([seconds] * ranks, sizes) == (sizes.batch_size,) * ranks


@given(st.lists(SECONDS, min_size=2, max_size=8, unique=True), SIZES, st.randoms())
def test_shares_follow_their_ranks(seconds, sizes, random):
    order = list(range(len(seconds)))
    random.shuffle(order)
    shares = deal(seconds, sizes)
    moved = deal([seconds[rank] for rank in order], sizes)
    assert longest(moved, [seconds[rank] for rank in order]) == longest(shares, seconds)  # ties may fall otherwise
    assert sorted(moved) == sorted(shares)


@given(st.lists(SECONDS, min_size=2, max_size=8), SIZES)
def test_a_slower_rank_never_has_more_samples(seconds, sizes):
    shares = deal(seconds, sizes)
    for ours, our_s in zip(shares, seconds, strict=True):
        for theirs, their_s in zip(shares, seconds, strict=True):
            assert ours <= theirs or our_s <= their_s


@given(st.lists(SECONDS, min_size=2, max_size=6), SIZES, st.integers(-9, 9))
def test_the_unit_of_time_does_not_matter(seconds, sizes, power):
    assert deal([each * 2.0**power for each in seconds], sizes) == deal(seconds, sizes)


def test_shares_follow_once_each_rank_has_two_times():
    policy = ShareBalancer(4, B)
    assert fed(policy, SLOW_LAST, updates=1) == []
    assert fed(policy, SLOW_LAST, updates=1) == [(18, 18, 18, 10)]
    assert fed(policy, SLOW_LAST, updates=50) == []


def test_times_that_do_not_count_are_waited_for():
    policy = ShareBalancer(4, B)
    for _ in range(9):
        assert policy.decide((16,) * 4, (16.0, 16.0, 0.0, 32.0)) is None
        assert policy.decide((16, 16, 0, 16), (16.0, 16.0, 16.0, 32.0)) is None
    assert policy.shares == (16,) * 4


def test_a_small_gain_is_no_reason():
    sizes = Pieces(100, pieces=100)
    assert fed(ShareBalancer(4, sizes), (1.0, 1.0, 1.0, 1.02), updates=50) == []
    assert fed(ShareBalancer(4, sizes), (1.0, 1.0, 1.0, 1.08), updates=50) != []


@parametrize_few("sigma", [0.3, 0.02, 0.1], keep=1)
def test_jitter_is_no_reason(sigma):
    changes = 0
    for seed in range(5):
        draws, policy = np.random.default_rng(seed), ShareBalancer(4, B)
        for _ in range(300):
            changes += (
                policy.decide(policy.shares, policy.shares * np.exp(sigma * draws.standard_normal(4))) is not None
            )
    assert changes == 0


def test_a_gain_above_the_noise_is_one():
    draws, policy = np.random.default_rng(0), ShareBalancer(4, B)
    for _ in range(50):
        policy.decide(policy.shares, policy.shares * np.exp(0.3 * draws.standard_normal(4)) * SLOW_LAST)
    assert policy.shares[3] < 12


def test_equal_shares_come_back_after_times_that_were_slow_by_chance():
    policy = ShareBalancer(4, B)
    fed(policy, (1.0,) * 4, updates=15)
    noise = [1, 9, 1, 1 / 9] * 4  # a long memory of noise, which a gain must stand out from
    for factor in noise:
        policy.decide((16,) * 4, [16.0, 16.0, 16.0 * factor, 16.0])
    policy.shares = (20, 20, 20, 4)
    assert fed(policy, (1.0,) * 4, updates=1) == [(16,) * 4]


@given(st.lists(st.lists(SECONDS, min_size=3, max_size=3), min_size=1, max_size=60))
def test_shares_are_always_allowed_and_a_change_is_predicted_to_be_faster(updates):
    policy = ShareBalancer(3, B)
    for seconds in updates:
        before = policy.shares
        decision = policy.decide(before, [count * each for count, each in zip(before, seconds, strict=True)])
        assert sum(policy.shares) == 48
        assert all(B.fewest <= share <= B.most and share % B.size == 0 for share in policy.shares)
        if decision is None:
            assert policy.shares == before
            continue
        medians = [known.median for known in policy.known]
        assert decision.shares == policy.shares != before
        assert longest(policy.shares, medians) <= longest(before, medians)


def test_a_move_is_followed_at_once_where_moves_have_lasted():
    policy, delays = ShareBalancer(4, B), []
    for turn in range(6):
        seconds = [3.0 if rank == turn % 4 else 1.0 for rank in range(4)]
        for update in range(15):
            if fed(policy, seconds, updates=1) and policy.shares[turn % 4] < 16:
                delays.append(update)
                break
        fed(policy, seconds, updates=15 - update)
    assert delays == [1, 1, 1, 0, 0, 0]


def test_a_saved_policy_decides_as_if_it_had_not_been_saved():
    draws = np.random.default_rng(1)
    times = [np.exp(0.1 * draws.standard_normal(4)) * ([1, 1, 3, 1] if u // 10 % 2 else 1) for u in range(60)]
    whole, resumed = ShareBalancer(4, B), ShareBalancer(4, B)
    for seconds in times[:37]:
        whole.decide(whole.shares, whole.shares * seconds)
    resumed.load_state_dict(decode(encode(whole.state_dict(), {}), {}))
    found = [
        [policy.decide(policy.shares, policy.shares * seconds) for seconds in times[37:]] for policy in (whole, resumed)
    ]
    assert found[0] == found[1]
    assert any(found[0])


def test_known_times_of_ranks_are_kept_for_other_ranks():
    policy = ShareBalancer(4, B)
    fed(policy, SLOW_LAST, updates=5)
    fewer = policy.for_ranks([0, None, 3])
    assert fewer.shares == (16, 16, 16)
    assert fed(fewer, (1.0, 1.0, 2.0), updates=1) == []
    assert fed(fewer, (1.0, 1.0, 2.0), updates=1) == [(20, 18, 10)]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: Pieces(0), "batch_size"),
        (lambda: Pieces(8, pieces=0), "pieces"),
        (lambda: Pieces(8, max_share=0.9), "max_share"),
        (lambda: Pieces(8, max_share=inf), "max_share"),
        (lambda: ShareBalancer(0, B), "ranks"),
    ],
)
def test_wrong_arguments_are_named(wrong, named):
    with pytest.raises(UsageError, match=named):
        wrong()
