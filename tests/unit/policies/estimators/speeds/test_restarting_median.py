"""Median that begins anew after a jump."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.codec import decode, encode
from paceline.policies.estimators.speeds.restarting_median import JUMP, JumpCounts, RestartingMedian

WINDOW = 5
VALUES = st.floats(0.01, 100)
STEADY = st.floats(1, JUMP)


def fed(values, window=WINDOW, jumps=None):
    seconds = RestartingMedian(window, jumps)
    for value in values:
        seconds.add(value)
    return seconds


def lasting():
    jumps = JumpCounts()
    jumps.lasting = 100
    return jumps


@given(st.lists(STEADY, min_size=1, max_size=30), st.integers(1, 9))
def test_without_a_jump_it_is_the_median_of_the_latest_values(values, window):
    for jumps in (None, lasting()):
        assert fed(values, window, jumps).median == median(values[-window:])


@given(st.lists(VALUES, min_size=1, max_size=40), st.integers(1, 9))
def test_the_window_is_an_end_of_the_values(values, window):
    for jumps in (None, lasting()):
        kept = list(fed(values, window, jumps).values)
        assert 1 <= len(kept) <= window
        assert kept == values[-len(kept) :]


@given(st.lists(VALUES, min_size=1, max_size=40), st.integers(-9, 9))
def test_the_unit_does_not_matter(values, power):
    factor = 2.0**power
    assert fed([value * factor for value in values]).median == fed(values).median * factor


@given(st.lists(STEADY, min_size=1, max_size=20), VALUES)
def test_two_far_values_in_a_row_are_all_that_counts(values, factor):
    before = fed(values).median
    for far in (JUMP * before * (1 + factor), before / JUMP / (1 + factor)):
        for jumps in (None, lasting()):
            assert list(fed([*values, far, far], jumps=jumps).values) == [far] * 2


@given(st.lists(STEADY, min_size=2, max_size=20), VALUES)
def test_one_far_value_counts_alone_only_where_far_values_last(values, factor):
    window = 99
    before = fed(values, window).median
    far = JUMP * before * (1 + factor)
    assert list(fed([*values, far], window).values) == [*values, far]
    assert list(fed([*values, far], window, lasting()).values) == [far]
    assert list(fed([*values, far, before], window, lasting()).values) == [*values, far, before]


def test_far_values_on_both_sides_are_no_jump():
    assert fed([1.0, 1.0, 1.0, 9.0]).median == 1.0
    assert fed([1.0, 1.0, 1.0, 9.0, 1.0, 9.0]).median == 1.0
    assert fed([1.0, 1.0, 1.0, 9.0, 0.1]).median == 1.0


def test_far_values_are_counted_by_whether_they_last():
    jumps = JumpCounts()
    single = jumps.single
    fed([1.0, 1.0, 9.0, 1.0, 9.0, 0.1, 1.0, 9.0, 9.0, 9.0, 9.0, 1.0, 1.0], jumps=jumps)
    assert (jumps.lasting, jumps.single - single) == (2, 3)


def test_a_median_without_values_is_unknown():
    assert fed([]).median != fed([]).median


@given(st.lists(VALUES, max_size=20), st.lists(VALUES, min_size=1, max_size=20))
def test_a_saved_median_goes_on(before, after):
    whole, resumed = fed(before), RestartingMedian(WINDOW, jumps := JumpCounts())
    resumed.load_state_dict(decode(encode(whole.state_dict(), {}), {}))
    jumps.load_state_dict(decode(encode(whole._jumps.state_dict(), {}), {}))
    for value in after:
        whole.add(value)
        resumed.add(value)
    assert list(whole.values) == list(resumed.values)
