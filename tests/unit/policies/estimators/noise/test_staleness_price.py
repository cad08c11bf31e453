from math import pi, sin

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.policies.estimators.noise.staleness_price import (
    Reference,
    StalenessPrice,
    even_schedule,
    largest_stable_step,
    price_of,
)


@pytest.mark.parametrize("staleness", [1, 2, 3, 7, 15, 31, 63])
def test_the_limit_of_a_constant_staleness_is_known(staleness):
    exact = 2 * sin(pi / (4 * staleness + 2))
    assert 0.9 * exact <= largest_stable_step([(staleness,)]) <= exact * 1.0001


def test_fresh_gradients_have_the_limit_two_and_the_price_one():
    assert largest_stable_step([(0,), (0, 0, 0)]) == 2.0
    assert price_of([(0, 0)]) == 1.0


def spectral_radius(schedule, a):
    """Return the growth per period of x_{i+1} = x_i - a mean_j x_{i - t_j}, by its largest eigenvalue."""
    depth = 1 + max(map(max, schedule))
    product = np.eye(depth)
    for stalenesses in schedule:
        step = np.eye(depth, k=-1)
        step[0, 0] = 1.0
        for staleness in stalenesses:
            step[0, staleness] -= a / len(stalenesses)
        product = step @ product
    return max(abs(np.linalg.eigvals(product)))


updates = st.lists(st.integers(0, 6), min_size=1, max_size=3)


@given(st.lists(updates, min_size=1, max_size=5))
def test_every_step_below_the_limit_is_stable_and_the_next_ones_are_not(schedule):
    a = largest_stable_step(schedule)
    assert all(spectral_radius(schedule, share * a) < 1.0001 for share in np.linspace(0.05, 0.97, 24))
    beyond = [share * a for share in np.linspace(1.0, 1.25, 26)]
    assert a == 2.0 or max(spectral_radius(schedule, each) for each in beyond) > 0.99


def largest_root(a, momentum, staleness):
    """Return the growth of x_{i+1} - x_i = mu (x_i - x_{i-1}) - (1 - mu) a x_{i-t}, by the roots of its polynomial."""
    polynomial = np.zeros(staleness + 2 if staleness else 3)
    polynomial[:3] = 1, -(1 + momentum), momentum
    polynomial[-1 if staleness else 1] += (1 - momentum) * a
    return max(abs(np.roots(polynomial)))


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("staleness", [1, 3, 7])
def test_the_limit_with_momentum_is_that_of_the_roots(staleness, momentum):
    step = largest_stable_step([(staleness,)], Reference(momentum))
    assert largest_root(step, momentum, staleness) < 1.0002
    assert largest_root(1.1 * step, momentum, staleness) > 1.0
    assert largest_stable_step([(staleness,)], Reference.of_sgd(momentum, 1)) == pytest.approx(step, rel=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_fresh_gradients_are_stable_up_to_the_limit_of_the_reference(momentum):
    limit = Reference.of_sgd(momentum, K=8).limit
    assert largest_stable_step([(0, 0)], Reference.of_sgd(momentum, K=8)) == limit
    assert largest_root(0.999 * limit, momentum, 0) < 1 < largest_root(1.001 * limit, momentum, 0)


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("staleness", [1, 3, 7])
def test_momentum_raises_the_price_by_what_it_adds_to_the_reference(staleness, momentum):
    """With stale gradients no momentum makes larger steps stable than none."""
    plain, heavy = (price_of([(staleness,)], Reference.of_sgd(each, K=8)) for each in (0.0, momentum))
    assert heavy > 0.95 * plain * (1 + momentum) / (1 - momentum)


def test_the_momentum_of_an_update_is_that_of_its_gradients():
    """Updates of one gradient, in a run whose reference has eight, have the momentum 0.9^(1/8)."""
    of_one, of_eight = [(7,)], [(7,) * 8]
    reference = Reference.of_sgd(0.9, K=8)
    assert largest_stable_step(of_eight, reference) == pytest.approx(
        largest_stable_step([(7,)], Reference(0.9)), rel=0.1
    )
    step = largest_stable_step(of_one, reference)
    assert largest_root(step, 0.9 ** (1 / 8), 7) < 1.0002
    assert largest_root(1.1 * step, 0.9 ** (1 / 8), 7) > 1.0


def test_more_workers_make_asp_dearer():
    prices = [price_of(even_schedule(pl.asp(), n)) for n in (2, 4, 8, 16)]
    assert prices == sorted(prices)
    assert prices[-1] == pytest.approx(1.15 / sin(pi / 62), rel=0.1)  # constant staleness 15


def test_the_price_of_a_run_follows_its_own_updates():
    price = StalenessPrice()
    price.follow(pl.asp(), n=4)
    assert price.price == pytest.approx(price_of([(3,)]), rel=0.1)
    for _ in range(32):
        price.observe((1,))
    assert price.price > 3  # the scan of this window takes the next updates
    for _ in range(10):
        price.observe((1,))
    assert price.price == pytest.approx(price_of([(1,)]))


def test_the_price_of_a_protocol_may_be_given():
    price = StalenessPrice()
    price.follow(pl.asp(), n=4, price=3.5)
    assert price.price == 3.5
    price.follow(pl.k_sync(k=2), n=4)
    for _ in range(100):
        price.observe((0, 0))
    assert price.price == 1.0


@pytest.mark.parametrize("before", [20, 34])  # in a window, and in a scan
def test_a_price_goes_on_from_its_state(before):
    first, second = StalenessPrice(), StalenessPrice()
    first.follow(pl.asp(), n=2)
    for _ in range(before):
        first.observe((2,))
    second.load_state_dict(first.state_dict())
    for each in (first, second):
        for _ in range(45 - before):
            each.observe((1,))
    assert second.state_dict() == first.state_dict()
    stale = min(before, 32)
    assert first.price == pytest.approx(price_of([(2,)] * stale + [(1,)] * (32 - stale)))


@pytest.mark.parametrize("schedule", [[], [()], [(0,), ()]])
def test_an_empty_schedule_is_refused(schedule):
    with pytest.raises(pl.UsageError, match="schedule="):
        largest_stable_step(schedule)
