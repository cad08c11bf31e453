"""The knee of a curve: synthetic curves whose answer is known, and properties of any curve."""

from math import exp, inf, log, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RunError, UsageError
from paceline.experiments.lr_range_test.curve import RISE, Range, averaged, find_knee, smoothed

RANGE = Range(lowest=1e-3, highest=1.0, updates=100)
positive = st.floats(0.01, 100)


def valley(rates, turn, begin=2.0):
    """Fall by 1 for each factor of e up to the turn, and rise three times as fast beyond it."""
    fall = [log(rates[0] / rate) for rate in rates]
    rise = [4 * max(0.0, log(rate / turn)) for rate in rates]
    return [begin, *(begin - 0.01 + down + up for down, up in zip(fall, rise, strict=True))]


@pytest.mark.parametrize("place", [1, 20, 55, 90])
def test_the_knee_is_at_the_turn_of_the_loss(place):
    turn = RANGE.rates[place]
    reading = find_knee(RANGE.rates, valley(RANGE.rates, turn))
    assert reading.learning_rate == pytest.approx(turn)
    assert not reading.is_bound


def least_squares(rates, m, noise, d=20):
    """Return the expected losses of SGD on least squares of d Gaussian inputs, with m samples in an update."""
    distance, losses = float(d), [(d + noise**2) / 2]
    for rate in rates:
        distance *= 1 - 2 * rate + rate**2 * (1 + (d + 1) / m)
        distance += rate**2 * noise**2 * d / m
        losses.append(min((distance + noise**2) / 2, losses[0]))
    return losses


@pytest.mark.parametrize(("noise", "least", "most"), [(0.1, 0.7, 1.2), (0.3, 0.7, 1.1), (1.0, 0.35, 1.0)])
def test_the_knee_rises_with_the_samples_of_an_update_as_the_limit_of_least_squares(noise, least, most):
    rates = Range(lowest=1e-3, highest=30.0, updates=400).rates
    samples = [4, 8, 16, 32, 64]
    limits = [2 * m / (m + 21) for m in samples]
    knees = [find_knee(rates, smoothed(least_squares(rates, m, noise))).learning_rate for m in samples]
    assert all(least < knee / limit < most for knee, limit in zip(knees, limits, strict=True))
    assert knees == sorted(knees)
    assert knees[-1] / knees[0] > 0.7 * limits[-1] / limits[0]


@pytest.mark.parametrize(("share", "place"), [(0.9, 80), (1.1, 30)])
def test_the_curve_ends_at_a_rise_by_a_fraction_of_the_total_decrease(share, place):
    """The loss falls from 3 to 1 at place 30, rises by about the share that counts, and falls to 0 at place 80."""
    top = 1 + share * RISE * 3
    losses = np.interp(range(101), [0, 31, 40, 81, 100], [3, 1, top, 0, 3])
    assert find_knee(RANGE.rates, list(losses)).learning_rate == RANGE.rates[place]


@pytest.mark.parametrize("turn", [0.01, 0.03, 0.1, 0.15, 0.3, 0.5])
def test_noisy_curves_have_the_knee_of_the_smooth_curve(turn):
    losses = np.array(valley(RANGE.rates, turn, begin=8.0))

    def found(seed):
        noise = np.random.default_rng(seed).normal(scale=0.3, size=len(losses))
        return find_knee(RANGE.rates, smoothed(list(losses + noise))).learning_rate

    apart = [max(found(seed) / turn, turn / found(seed)) for seed in range(50)]
    assert np.quantile(apart, 0.9) < 1.3
    assert max(apart) < 1.7


@given(turn=st.floats(0.01, 0.5), unit=positive, offset=st.floats(-10, 10), scale=positive)
def test_the_knee_does_not_depend_on_the_units_of_loss_and_rate(turn, unit, offset, scale):
    losses = valley(RANGE.rates, turn)
    first = find_knee(RANGE.rates, losses).learning_rate
    other = find_knee([scale * rate for rate in RANGE.rates], [offset + unit * loss for loss in losses]).learning_rate
    assert other == pytest.approx(scale * first)


def test_a_curve_that_falls_to_its_end_gives_a_bound():
    reading = find_knee(RANGE.rates, valley(RANGE.rates, turn=2.0))
    assert reading.is_bound
    assert reading.learning_rate == pytest.approx(1.0)


def test_a_curve_that_never_falls_has_no_knee():
    with pytest.raises(RunError, match=r"never fell below its initial value 2 at rates from 0.001 to 1; give a sm"):
        find_knee(RANGE.rates, [2.0] * 101)


def test_the_rates_rise_by_the_same_factor_from_the_lowest_to_the_highest():
    ratios = np.diff(np.log(RANGE.rates))
    assert ratios == pytest.approx(np.full(99, log(1000) / 99))
    assert (RANGE.rates[0], RANGE.rates[-1]) == pytest.approx((1e-3, 1.0))
    assert RANGE.rate(101) == RANGE.rates[-1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lowest": 0.0}, r"lowest=0.0 is not a number in \(0, inf\)"),
        ({"highest": inf}, r"highest=inf is not a number in \(0, inf\)"),
        ({"lowest": 1.0}, r"lowest=1.0 and highest=1.0; expected rising rates, for example lowest=0.001, highest=1"),
        ({"lowest": 2.0}, r"lowest=2.0 and highest=1.0; expected rising rates"),
        ({"updates": 9}, r"updates=9 is not a whole number in \[10, inf\)"),
        ({"updates": 20.0}, r"updates=20.0 is not a whole number in \[10, inf\)"),
    ],
)
def test_an_invalid_range_is_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        Range(**{"lowest": 1e-3, "highest": 1.0, "updates": 100, **settings})


def test_losses_that_are_missing_or_above_the_start_count_as_the_start():
    runs = [[2.0, 1.0, 5e9, nan, 0.5], [4.0, 2.0]]
    assert averaged(runs, points=4) == [3.0, 1.5, 3.0, 3.0, 1.75]


@given(st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=4))
def test_the_mean_curve_never_exceeds_its_first_value(runs):
    begin, *after = averaged(runs, points=3)
    assert begin == pytest.approx(sum(losses[0] for losses in runs) / len(runs))
    assert all(loss <= begin + 1e-12 for loss in after)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=120))
def test_smoothing_is_an_average_under_a_gaussian_window(losses):
    width = max(1.0, 0.02 * len(losses))
    for place, found in enumerate(smoothed(losses)):
        weights = [exp(-0.5 * ((place - other) / width) ** 2) for other in range(len(losses))]
        wanted = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
        assert found == pytest.approx(wanted, abs=1e-9)
