"""Losses of minibatches from those of their parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies.estimators.noise.minibatch_losses import MinibatchLosses


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 12)), max_size=60))
def test_each_sample_counts_once_in_the_order_of_the_parts(parts):
    losses = MinibatchLosses()
    found = [each for loss, eighths in parts for each in losses.add(loss, eighths / 8)]
    samples = [loss for loss, eighths in parts for _ in range(eighths)]
    expected = [sum(samples[begin : begin + 8]) / 8 for begin in range(0, len(samples) - 7, 8)]
    assert found == pytest.approx(expected, abs=1e-9)


def test_whole_minibatches_keep_their_bits_and_a_state_goes_on():
    losses, other = MinibatchLosses(), MinibatchLosses()
    assert losses.add(0.1, 1.0) == [0.1]
    assert losses.add(1.0, 1 / 3) == losses.add(1.0, 1 / 3) == []
    other.load_state_dict(losses.state_dict())
    assert losses.add(4.0, 1 / 3) == other.add(4.0, 1 / 3) == [pytest.approx(2.0)]
