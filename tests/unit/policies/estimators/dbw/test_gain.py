"""The gain of an update, against the paper's formulas written down literally on whole vectors."""

from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.events import Step
from paceline.errors import UsageError
from paceline.policies.estimators.dbw.gain import GainEstimator, GainInput


def sgd_step(mean, rate, next_rate=None):
    norm = float(mean @ mean)
    return Step(
        squared_norm=norm,
        progress=rate * norm,
        squared_step=rate**2 * norm,
        learning_rate=rate,
        next_learning_rate=rate if next_rate is None else next_rate,
    )


def told(gradients, loss, rate, within=nan, weights=None):
    gradients = np.asarray(gradients, dtype=float)
    mean = np.average(gradients, axis=0, weights=weights)
    mean_square = float(np.average((gradients**2).sum(axis=1), weights=weights))
    return GainInput(k=len(gradients), loss=loss, mean_square=mean_square, within=within, step=sgd_step(mean, rate))


def literal(updates, rate, D, n):
    """Equations (10) to (16), one after the other, on lists of (gradients, loss)."""
    V, N, L = [], [], []
    for t, (gradients, loss) in enumerate(updates):
        k, g = len(gradients), np.mean(gradients, axis=0)
        V.append(sum(sum((gradient - g) ** 2) for gradient in gradients) / (k - 1))  # (10)
        N.append(max(g @ g - V[-1] / k, 0))  # (11)
        if t:
            k_before = len(updates[t - 1][0])
            gain = updates[t - 1][1] - loss
            L.append(2 * (rate * N[t - 1] - gain) / (rate**2 * (N[t - 1] + V[t - 1] / k_before)))  # (12)
    V, N, L = np.mean(V[-D:]), np.mean(N[-D:]), max(np.mean(L[-D:]), 0)  # (13) to (15)
    return [(rate - L * rate**2 / 2) * N - L * rate**2 / 2 * V / k for k in range(1, n + 1)]  # (16)


def random_updates(seed, count, dimensions=7):
    rng = np.random.default_rng(seed)
    drift = rng.normal(size=dimensions)
    loss = 2.0
    for _ in range(count):
        loss *= rng.uniform(0.85, 1.02)
        yield drift + 0.5 * rng.normal(size=(int(rng.integers(2, 9)), dimensions)), loss


@given(seed=st.integers(0, 10**6), count=st.integers(2, 12), D=st.integers(1, 6), rate=st.floats(1e-3, 1))
def test_the_gain_equals_the_equations_of_the_paper(seed, count, D, rate):
    updates = list(random_updates(seed, count))
    estimator = GainEstimator(D)
    for gradients, loss in updates:
        estimator.observe(told(gradients, loss, rate))
    assert estimator.gains([rate] * 9) == pytest.approx(literal(updates, rate, D, 9), rel=1e-9, abs=1e-12)


def test_the_smoothness_of_a_quadratic_is_its_curvature():
    """F = c |w|^2 / 2 without noise: every step measures L = c exactly, and the gain is the decrease exactly."""
    curvature, rate = 3.0, 0.1
    w = np.array([1.0, -2.0, 0.5])
    estimator, losses = GainEstimator(5), []
    for _ in range(6):
        loss = curvature * (w @ w) / 2
        losses.append(loss)
        estimator.observe(told([curvature * w] * 3, loss, rate))
        w = w - rate * curvature * w
    assert pytest.approx(curvature) == estimator.smoothness
    latest = GainEstimator(1)
    for t in (3, 4):
        latest.observe(told([[(2 * curvature * losses[t]) ** 0.5]] * 3, losses[t], rate))
    assert latest.gains([rate]) == pytest.approx([losses[4] - losses[5]])


@pytest.mark.slow
def test_the_variance_has_no_bias_with_minibatches_of_different_sizes():
    rng = np.random.default_rng(1)
    sizes = np.array([1, 2, 5])
    variance_of_one_sample = 4.0
    found = []
    for _ in range(4000):
        gradients = 1.0 + rng.normal(size=(3, 1)) * np.sqrt(variance_of_one_sample / sizes)[:, None]
        estimator = GainEstimator(1)
        estimator.observe(told(gradients, 1.0, 0.1, weights=sizes))
        found.append(estimator.variance)
    assert np.mean(found) == pytest.approx(variance_of_one_sample / sizes.mean(), rel=0.05)


def test_an_update_of_a_single_gradient_gives_no_estimate():
    estimator, told_before = GainEstimator(2), [(2.0, 1.0), (3.0, 0.9), (1.0, 0.85)]
    for spread, loss in told_before:
        estimator.observe(told([[5 + spread], [5 - spread]], loss, 0.1))
    known = (estimator.variance, estimator.squared_norm, estimator.smoothness)
    assert known[0] == pytest.approx((2 * 3.0**2 + 2 * 1.0**2) / 2)
    for loss in (0.5, 2.0, 0.1):
        estimator.observe(told([[4.0]], loss, 0.1))
        assert (estimator.variance, estimator.squared_norm, estimator.smoothness) == known
    estimator.observe(told([[5.0], [5.0]], 0.8, 0.1))  # V and N are told anew; L needs two such updates in a row
    assert estimator.smoothness == known[2]
    assert estimator.variance == pytest.approx((2 * 1.0**2 + 0.0) / 2)
    estimator.observe(told([[5.0], [5.0]], 0.7, 0.1))
    assert estimator.smoothness != known[2]


def test_a_single_gradient_of_microbatches_has_a_variance():
    estimator = GainEstimator(1)
    estimator.observe(told([[4.0]], 1.0, 0.1, within=3.0))
    assert (estimator.variance, estimator.squared_norm) == (3.0, 13.0)


def test_there_is_no_gain_before_two_updates():
    estimator = GainEstimator(5)
    assert estimator.gains([0.1]) is None
    estimator.observe(told([[1.0], [2.0]], 1.0, 0.1))
    assert estimator.gains([0.1]) is None
    estimator.observe(told([[1.0], [2.0]], 0.9, 0.1))
    assert estimator.gains([0.1]) is not None


def test_single_gradients_from_the_start_give_no_gain():
    estimator = GainEstimator(5)
    for loss in (1.0, 0.9, 0.8):
        estimator.observe(told([[1.0]], loss, 0.1))
    assert estimator.gains([0.1]) is None


def test_smoothness_is_clipped_after_averaging():
    """Gains larger than the gradient explains make L+ negative; clipping each would make the mean too large."""
    losses = [1.0, 0.0, 0.2]  # the first step gains too much, the second one loses
    estimator = GainEstimator(2)
    for loss in losses:
        estimator.observe(told([[1.0], [1.0]], loss, 0.1))
    raw = [2 * (0.1 - (a - b)) / 0.1**2 for a, b in pairwise(losses)]
    assert min(raw) < 0 < max(raw)
    assert max(np.mean(raw), 0) == pytest.approx(estimator.smoothness, abs=1e-9)


def test_zero_gradients_and_infinite_steps_are_no_estimates():
    estimator = GainEstimator(3)
    estimator.observe(told([[0.0], [0.0]], 1.0, 0.1))
    estimator.observe(told([[0.0], [0.0]], 1.0, 0.1))
    assert estimator.gains([0.1]) is None  # 0 / 0 is no smoothness
    estimator.observe(
        GainInput(
            k=2,
            loss=1.0,
            mean_square=2.0,
            within=nan,
            step=Step(squared_norm=1.0, progress=inf, squared_step=inf, learning_rate=0.1, next_learning_rate=0.1),
        )
    )
    estimator.observe(told([[1.0], [3.0]], 0.9, 0.1))
    estimator.observe(told([[1.0], [3.0]], 0.8, 0.1))
    assert all(np.isfinite(estimator.gains([0.1] * 4)))


@pytest.mark.parametrize(("g", "loss", "rate"), [(1e150, 1e200, 1e3), (1e-3, 1.0, 1e-200), (1.0, 1e300, 0.1)])
def test_overflowing_numbers_give_no_gain(g, loss, rate):
    estimator = GainEstimator(2)
    for factor in (1.0, 10.0, 100.0):
        gradients = np.array([[g], [3 * g]])
        step = Step(
            squared_norm=float(4 * g * g),
            progress=float(rate * 4 * g * g),
            squared_step=float(rate * rate * 4 * g * g),
            learning_rate=rate,
            next_learning_rate=rate,
        )
        estimator.observe(
            GainInput(k=2, loss=factor * loss, mean_square=float(np.mean(gradients**2)), within=nan, step=step)
        )
    for gains in (estimator.gains([rate] * 3), estimator.gains([1e200] * 3)):
        assert gains is None or all(gain < np.inf for gain in gains)  # which nan is not


def test_a_learning_rate_of_zero_gives_no_estimate_and_no_gain():
    estimator = GainEstimator(3)
    for loss, rate in ((1.0, 0.1), (0.9, 0.1), (0.7, 0.0)):
        estimator.observe(told([[1.0], [3.0]], loss, rate))
    before = estimator.smoothness
    estimator.observe(told([[1.0], [3.0]], 0.1, 0.1))
    assert before == estimator.smoothness
    assert estimator.gains([0.0] * 3) == [0.0] * 3


def test_the_rate_of_the_next_step_is_used():
    estimator = GainEstimator(5)
    updates = list(random_updates(3, 5))
    for gradients, loss in updates:
        estimator.observe(told(gradients, loss, 0.1))
    V, N, L = estimator.variance, estimator.squared_norm, estimator.smoothness
    rates = [0.02, 0.04, 0.06]
    expected = [(r - L * r**2 / 2) * N - L * r**2 / 2 * V / k for k, r in enumerate(rates, start=1)]
    assert estimator.gains(rates) == pytest.approx(expected)


def test_a_step_longer_than_plain_sgd_uses_its_measured_length():
    """A step of c times the gradient, as momentum makes it, is plain SGD's with c times the rate."""
    c, plain, longer = 4.0, GainEstimator(5), GainEstimator(5)
    for gradients, loss in random_updates(5, 6):
        plain.observe(told(gradients, loss, 0.4))
        made = told(gradients, loss, 0.1)
        step = made.step._replace(progress=c * made.step.progress, squared_step=c**2 * made.step.squared_step)
        longer.observe(made._replace(step=step))
    assert longer.smoothness == pytest.approx(plain.smoothness)
    assert longer.gains([0.1] * 5) == pytest.approx(plain.gains([0.4] * 5))


@pytest.mark.parametrize("D", [0, -1, 2.5, "5"])
def test_a_window_of_no_updates_is_refused(D):
    with pytest.raises(UsageError, match="is not a whole number in"):
        GainEstimator(D)


def test_a_restored_state_is_bit_identical():
    whole, first = GainEstimator(3), GainEstimator(3)
    updates = [told(gradients, loss, 0.1) for gradients, loss in random_updates(11, 8)]
    for update in updates[:5]:
        first.observe(update)
    second = GainEstimator(3)
    second.load_state_dict(first.state_dict())
    for update in updates:
        whole.observe(update)
    for update in updates[5:]:
        second.observe(update)
    assert second.gains([0.1] * 4) == whole.gains([0.1] * 4)
    assert str(second.state_dict()) == str(whole.state_dict())
