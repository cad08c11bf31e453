"""Closing of an update: the inequality, and what follows from it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies.estimators.arrivals.update_closing import GainPerSecond, best_wait, gain, largest_gain_per_s

HORIZONS = [0.1, 0.3, 1.0, 3.0]
ARRIVALS = st.lists(st.floats(0, 8), min_size=4, max_size=4).map(lambda each: np.cumsum(each))
PHI, RATE = st.floats(0.01, 1000), st.floats(0, 10)


@given(st.integers(1, 50), PHI, RATE, ARRIVALS)
def test_it_waits_only_if_some_horizon_pays(held, phi, rate, arrivals):
    wait = best_wait(held, phi, rate, HORIZONS, arrivals)
    surplus = [gain(held + a, phi) - gain(held, phi) - rate * h for a, h in zip(arrivals, HORIZONS, strict=True)]
    if wait.horizon_s:
        assert surplus[HORIZONS.index(wait.horizon_s)] == pytest.approx(max(surplus))
        assert wait.gain_per_s > rate
    else:
        assert max(surplus) <= 1e-12


@given(st.integers(1, 50), PHI, RATE, ARRIVALS)
def test_a_run_that_gains_more_waits_less(held, phi, rate, arrivals):
    waits = [best_wait(held, phi, each, HORIZONS, arrivals).horizon_s for each in (0.5 * rate, rate, 2 * rate)]
    assert waits == sorted(waits, reverse=True)


@given(st.integers(1, 50), PHI, RATE, ARRIVALS, st.sampled_from([0.25, 4.0]))
def test_the_unit_of_time_does_not_matter(held, phi, rate, arrivals, unit):
    ours = best_wait(held, phi, rate, HORIZONS, arrivals)
    other = best_wait(held, phi, rate / unit, [unit * each for each in HORIZONS], arrivals)
    assert other.horizon_s == unit * ours.horizon_s


def test_it_waits_for_many_where_phi_is_large_and_closes_where_it_is_small():
    soon = np.array([4.0, 8.0, 8.0, 8.0])
    assert best_wait(4, 100.0, 0.1, HORIZONS, soon).horizon_s == 0.3
    assert best_wait(4, 0.1, 0.2, HORIZONS, soon).horizon_s == 0


def test_the_gain_per_second_follows_phi_and_forgets():
    rate = GainPerSecond()
    assert rate.value(1.0) == 0
    for k, seconds in ((4, 1.0), (8, 3.0)):
        rate.add(k, seconds)
    for phi in (1.0, 50.0):
        assert rate.value(phi) == pytest.approx((1 * gain(4, phi) + 2 * gain(8, phi)) / (1 * 1.0 + 2 * 3.0))
    for _ in range(1500):
        rate.add(2, 0.5)
    assert rate.value(8.0) == pytest.approx(0.4, rel=1e-3)
    again = GainPerSecond()
    again.load_state_dict(rate.state_dict())
    again.add(3, 1.0)
    rate.add(3, 1.0)
    assert again.value(5.0) == rate.value(5.0)


def test_the_largest_gain_per_second_is_that_of_the_best_horizon():
    assert largest_gain_per_s(10.0, [1.0, 2.0, 4.0], [2.0, 10.0, 16.0]) == 0.25
