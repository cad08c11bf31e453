"""Expected order statistics against closed forms, identities that hold for every law, and brute force."""

from itertools import product
from math import log
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.theory import harmonic, log_harmonic, order_statistic
from paceline.theory.assumptions import RoundTripDistribution
from paceline.theory.order_statistics import _quadrature
from selections import parametrize_few

CLOSED = [
    pl.timing.Deterministic(2.0),
    pl.timing.Uniform(1.0, 3.0),
    pl.timing.Exponential(2.0),
    pl.timing.ShiftedExponential(0.3, 0.7),
    pl.timing.Pareto(1.0, 3.0),
]
OTHERS = [
    pl.timing.LogNormal(1.0, 0.8),
    pl.timing.Gamma(0.5, 2.0),
    pl.timing.Gamma(3.0, 1.0),
    pl.timing.HyperExponential((1.0, 11.0), (0.9, 0.1)),
    pl.timing.Empirical((0.5, 1.0, 1.0, 4.0)),
    RoundTripDistribution(pl.timing.Gamma(3.0, 1.0), speed=2.0, network_s=0.5),
]


@pytest.mark.parametrize("law", CLOSED, ids=repr)
@pytest.mark.parametrize("n", [1, 2, 9, 1_000, 100_000])
def test_quadrature_finds_the_closed_form(law, n):
    for k in {1, (n + 1) // 2, n}:
        # The largest of very many heavy tails is in the last bits below 1 that a quantile function can be asked for.
        assert _quadrature(law, k, n) == pytest.approx(order_statistic(law, k, n), rel=1e-7 if k == n else 1e-11)


@pytest.mark.parametrize("law", CLOSED + OTHERS, ids=repr)
def test_the_order_statistics_of_n_times_add_up_to_n_means(law):
    assert sum(order_statistic(law, k, 7) for k in range(1, 8)) == pytest.approx(7 * law.expectation_s, rel=1e-9)


@parametrize_few("law", CLOSED + OTHERS, ids=repr, keep=5)
@given(k=st.integers(1, 40), more=st.integers(1, 40))
@settings(max_examples=10)
def test_leaving_one_of_n_times_out(law, k, more):
    # Which of n times is left out is one of the k first with probability k / n.
    n = k + more
    without = order_statistic(law, k, n - 1)
    of_n = (n - k) * order_statistic(law, k, n) + k * order_statistic(law, k + 1, n)
    assert of_n / n == pytest.approx(without, rel=1e-9)


@settings(max_examples=30)
@given(values=st.lists(st.integers(1, 9), min_size=1, max_size=4), n=st.integers(1, 4))
def test_measured_times_by_all_outcomes(values, n):
    outcomes = [sorted(outcome) for outcome in product(values, repeat=n)]
    law = pl.timing.Empirical(tuple(values))
    for k in range(1, n + 1):
        expected = mean(outcome[k - 1] for outcome in outcomes)
        assert order_statistic(law, k, n) == pytest.approx(expected, rel=1e-12)


def test_a_user_defined_distribution():
    class Square:
        expectation_s = 1 / 3

        def quantile(self, u):
            return u**2

    # E[U_{k:n}**2] = k (k + 1) / ((n + 1) (n + 2))
    assert order_statistic(Square(), 3, 5) == pytest.approx(3 * 4 / (6 * 7), rel=1e-12)


def test_the_harmonic_sum_and_its_approximation_in_the_paper():
    assert harmonic(8, 8) == pytest.approx(761 / 280, rel=1e-15)
    assert harmonic(2, 5) == pytest.approx(1 / 5 + 1 / 4, rel=1e-15)
    assert log_harmonic(8, 8) == log(8)
    assert log_harmonic(4, 8) == pytest.approx(log(2))
    assert log_harmonic(8, 8) / harmonic(8, 8) == pytest.approx(0.77, abs=0.01)
    assert harmonic(10**5, 10**5) - log_harmonic(10**5, 10**5) == pytest.approx(np.euler_gamma, abs=1e-4)


@pytest.mark.parametrize(("shape", "k"), [(1.0, 5), (0.5, 4), (0.2, 1)])
def test_a_tail_that_is_too_heavy_is_refused(shape, k):
    law = pl.timing.Pareto(1.0, shape)
    with pytest.raises(
        pl.UsageError, match=rf"order statistic {k} of 5 times .* has an infinite mean.* give a larger shape"
    ):
        order_statistic(law, k, 5)
    if k > 1:
        assert order_statistic(law, k - 1, 5) > order_statistic(pl.timing.Pareto(1.0, shape + 1), k - 1, 5)


def test_an_infinite_mean_of_a_distribution_without_closed_form_is_refused():
    with pytest.raises(pl.UsageError, match="has an infinite mean"):
        order_statistic(RoundTripDistribution(pl.timing.Pareto(1.0, 0.9), 1.0, 0.5), 3, 3)


@pytest.mark.parametrize(("k", "n"), [(0, 3), (4, 3), (1, 0), (1.5, 3), (True, 3)])
def test_numbers_out_of_range_are_refused(k, n):
    with pytest.raises(pl.UsageError, match=r"is not a whole number in \[1, |expected a whole number"):
        order_statistic(pl.timing.Exponential(1.0), k, n)
