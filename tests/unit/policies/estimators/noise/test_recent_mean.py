import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies.estimators.noise.recent_mean import RecentMean


def mean_of(values, share):
    mean = RecentMean(share)
    for value in values:
        mean.add(value)
    return mean


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30))
def test_the_whole_share_is_the_plain_mean(values):
    assert mean_of(values, 1.0).mean == pytest.approx(np.mean(values), abs=1e-9)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_the_mean_of_a_hyperbola_is_known(share):
    mean = mean_of([3.0 / i for i in range(1, 20_001)], share)
    assert mean.mean == pytest.approx(3.0 / 20_000 / (1 - share), rel=2e-3)


def test_the_difference_of_two_shares_is_the_rest_of_a_hyperbola():
    losses = [2.0 + 5.0 / i for i in range(1, 10_001)]
    fall = mean_of(losses, 0.5).mean - mean_of(losses, 0.1).mean
    assert fall / (1 / (1 - 0.5) - 1 / (1 - 0.1)) == pytest.approx(5.0 / 10_000, rel=0.01)
