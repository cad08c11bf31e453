"""Intervals of paired differences and ratios are those of scipy, and cover the truth as often as they claim."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline.utils.confidence_intervals import interval_of_mean, paired_difference, paired_ratio

PAIRS = st.lists(st.tuples(st.floats(0.01, 1e3), st.floats(0.01, 1e3)), min_size=2, max_size=12)


def by_seed(values):
    return dict(enumerate(values))


@settings(max_examples=40, deadline=None)
@given(PAIRS, st.sampled_from([0.5, 0.95, 0.999]))
def test_intervals_equal_those_of_scipy(pairs, level):
    first, second = (np.array(column) for column in zip(*pairs, strict=True))
    identity = np.array
    for ours, values, back in [
        (interval_of_mean(list(second), level), second, identity),
        (paired_difference(by_seed(first), by_seed(second), level), second - first, identity),
        (paired_ratio(by_seed(first), by_seed(second), level), np.log(first / second), np.exp),
    ]:
        n = len(values)
        half = stats.t.ppf((1 + level) / 2, n - 1) * values.std(ddof=1) / np.sqrt(n)
        centre = values.mean()
        assert ours[:3] == pytest.approx(back([centre, centre - half, centre + half]), rel=1e-9, abs=1e-9)
        assert ours.pairs == n


@pytest.mark.parametrize("values", [[], [1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_a_single_or_non_finite_value_gives_no_interval(values):
    assert interval_of_mean(values) is None


def test_only_common_seeds_are_paired():
    assert paired_difference({0: 1.0, 1: 2.0, 5: 99.0}, {1: 2.5, 0: 1.5, 6: -7.0}) == (0.5, 0.5, 0.5, 2)
    assert paired_difference({0: 1.0, 1: 2.0}, {1: 2.5}) is None
    assert paired_ratio({0: 1.0, 1: 0.0}, {0: 1.0, 1: 1.0}) is None


def test_intervals_have_their_nominal_coverage():
    generator = np.random.default_rng(0)
    trials = 2000
    covered = sum(
        paired_ratio(by_seed(10 * np.exp(noise)), by_seed(5 * np.exp(own))).contains(2.0)
        for noise, own in generator.normal(0, 0.3, (trials, 2, 3))
    )
    assert 0.935 <= covered / trials <= 0.965
