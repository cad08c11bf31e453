"""Dealing of samples of unequal cost."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies.dealing import deal_padded, deal_samples, of_few_counts
from paceline.policies.share_limits import MOST_SIZES
from selections import parametrize_few

COSTS = st.lists(st.integers(1, 20), min_size=3, max_size=7)
SECONDS = st.lists(st.sampled_from([1.0, 1.5, 2.0, 4.0]), min_size=2, max_size=3)


def summed(costs):
    return sum(costs)


def padded(costs):
    return max(costs) * len(costs)


def end_s(groups, costs, seconds, work):
    return max(work([costs[each] for each in group]) * s for group, s in zip(groups, seconds, strict=True))


def least_end_s(costs, seconds, work):
    """Return the least time of all divisions in which each rank has a sample."""
    ranks = range(len(seconds))
    found = []
    for owners in product(ranks, repeat=len(costs)):
        if len(set(owners)) == len(seconds):
            groups = [[each for each, owner in enumerate(owners) if owner == rank] for rank in ranks]
            found.append(end_s(groups, costs, seconds, work))
    return min(found)


@parametrize_few(("deal", "work"), [(deal_samples, summed), (deal_padded, padded)], keep=1)
@given(costs=COSTS, seconds=SECONDS)
def test_each_sample_is_dealt_once_and_the_end_is_near_the_least_one(deal, work, costs, seconds):
    groups = deal(costs, seconds)
    assert sorted(each for group in groups for each in group) == list(range(len(costs)))
    assert all(groups)
    assert end_s(groups, costs, seconds, work) <= 2 * least_end_s(costs, seconds, work)


@given(lengths=COSTS)
def test_equal_ranks_are_dealt_padded_samples_as_well_as_can_be(lengths):
    assert end_s(deal_padded(lengths, [1.0, 1.0]), lengths, [1.0, 1.0], padded) == least_end_s(
        lengths, [1.0, 1.0], padded
    )


@pytest.mark.parametrize("deal", [deal_samples, deal_padded])
def test_a_limit_holds_where_the_samples_can_be_dealt_so(deal):
    groups = deal([1.0] * 12, [1.0, 5.0, 5.0], most=[5.0] * 3)
    assert max(map(len, groups)) == 5
    groups = deal([9.0, 1, 1], [1.0, 1.0], most=[5.0] * 2)
    assert sorted(map(len, groups)) == [1, 2]


@pytest.mark.parametrize(("deal", "work"), [(deal_samples, summed), (deal_padded, padded)])
def test_the_limit_of_a_rank_is_its_own(deal, work):
    costs = [float(1 + each % 3) for each in range(24)]
    loads = [work([costs[each] for each in group]) for group in deal(costs, [1.0, 1.0, 1.0], most=[9.0, 30.0, 30.0])]
    assert loads[0] <= 9 < max(loads) <= 30


@parametrize_few(("deal", "work"), [(deal_samples, summed), (deal_padded, padded)], keep=1)
@given(rows=st.lists(st.lists(st.integers(1, 40), min_size=12, max_size=12), min_size=20, max_size=20), slow=SECONDS)
def test_the_batches_of_a_rank_have_few_sizes_over_time(deal, work, rows, slow):
    seconds, used = [1.0, *slow], [(12 // (len(slow) + 1),) * (len(slow) + 1)]
    most = [1e9] * len(seconds)
    dealt = [of_few_counts(deal, costs, seconds, most, used, work) for costs in rows]
    for groups, costs in zip(dealt, rows, strict=True):
        assert sorted(each for group in groups for each in group) == list(range(12))
        given_end_s = [end_s(deal(costs, seconds, most, counts), costs, seconds, work) for counts in used]
        assert end_s(groups, costs, seconds, work) <= max(given_end_s)
    for sizes in zip(*(map(len, groups) for groups in dealt), strict=True):
        assert len(set(sizes)) <= MOST_SIZES


def test_of_the_earlier_sizes_those_are_taken_that_end_first():
    used = [(each, 12 - each) for each in (3, 4, 5, 6, 8, 9)]
    groups = of_few_counts(deal_samples, [1.0] * 12, [1.0, 9.0], [1e9] * 2, used, summed)
    assert [*map(len, groups)] == [9, 3]
    limited = of_few_counts(deal_samples, [1.0] * 12, [1.0, 9.0], [7.0, 1e9], used, summed)
    assert [*map(len, limited)] == [6, 6]


@pytest.mark.parametrize("deal", [deal_samples, deal_padded])
def test_the_long_tail_of_lengths_is_shared(deal):
    work = padded if deal is deal_padded else summed
    lengths = [100, 90, *[10] * 14]
    equal = [list(range(8)), list(range(8, 16))]
    assert end_s(deal(lengths, [1.0, 1.0]), lengths, [1.0, 1.0], work) < end_s(equal, lengths, [1.0, 1.0], work)
