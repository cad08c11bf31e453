"""Estimated gradient noise of a run, against gradients of known noise."""

from dataclasses import replace
from math import inf, isnan, nan

import numpy as np
import pytest

from paceline.core.events import Step
from paceline.policies.estimators.dbw.gain import GainInput
from paceline.policies.estimators.noise.convergence import (
    Noise,
    ObservedUpdate,
    energy_curvature,
    estimate_noise,
    loss_at_end,
    relative_updates,
)
from selections import parametrize_few

ETA = 0.1


def observed(gradients, samples=4, scale=1.0):
    """Return the statistics of an update of these gradients [k, d], with plain SGD."""
    mean = gradients.mean(0)
    square = float(mean @ mean)
    step = Step(
        squared_norm=square,
        progress=ETA * scale * square,
        squared_step=(ETA * scale) ** 2 * square,
        learning_rate=ETA * scale,
        next_learning_rate=ETA,
    )
    told = GainInput(k=len(gradients), loss=nan, mean_square=float((gradients**2).sum(1).mean()), within=nan, step=step)
    return ObservedUpdate(gradients=told, samples=samples, staleness=0.0, rate_scale=scale)


def drawn(k, updates=4000, seed=0):
    """Return updates of a gradient with the covariance diag(c) around g, of 4 samples each."""
    rng = np.random.default_rng(seed)
    c, g = np.array([4.0, 1.0, 1.0, 0.5]), np.array([0.3, 0.2, 0.5, 0.1])
    return c, g, [observed(g + rng.normal(size=(k, 4)) * np.sqrt(c)) for _ in range(updates)]


@parametrize_few("k", [2, 5], keep=1)
def test_norm_variance_and_curvature_are_those_of_the_gradients(k):
    c, g, updates = drawn(k)
    found = estimate_noise(updates)
    assert found.variance == pytest.approx(c.sum(), rel=0.03)
    assert found.squared_norm == pytest.approx(g @ g, abs=0.15)
    assert found.eta == pytest.approx(ETA)
    # A log-likelihood's Hessian is the covariance of one sample's gradient: 4 times that of 4 samples.
    assert found.curvature == pytest.approx(4 * (c**2).sum() / c.sum(), rel=0.15)


def test_a_scaled_learning_rate_is_distinguished_from_that_of_the_optimizer():
    assert estimate_noise([observed(np.ones((2, 3)) * i, scale=0.25) for i in (1, 2)]).eta == pytest.approx(ETA)


def test_single_gradients_give_no_noise_estimate():
    found = estimate_noise([observed(np.ones((1, 3)))] * 3)
    assert isnan(found.variance)
    assert isnan(found.curvature)


def test_equal_gradients_have_no_noise():
    assert estimate_noise([observed(np.ones((3, 2)))] * 4).excess(1, 5.0, 1.0) == 0


def quadratic_sgd(h, eta, k, staleness, updates=400_000, seed=0):
    """Return the mean loss h w^2 / 2 of SGD on the mean gradient at earlier versions, weighted geometrically."""
    rng = np.random.default_rng(seed)
    share = staleness / (1 + staleness)
    w = mean = total = 0.0
    for i, xi in enumerate((rng.normal(size=updates) / np.sqrt(k)).tolist()):
        mean = share * mean + (1 - share) * w
        w -= eta * (h * mean + xi)
        if i > 1000:
            total += w * w
    return h / 2 * total / (updates - 1001)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "staleness"), [(1, 0.0), (4, 0.0), (1, 1.0), (2, 3.0), (1, 7.0)])
@pytest.mark.parametrize("a", [0.12, 0.7])
def test_the_excess_loss_equals_that_of_sgd_on_a_quadratic(a, k, staleness):
    excess = Noise(squared_norm=nan, variance=1.0, curvature=2.0, eta=a / 2).excess(k, staleness, 1.0)
    assert excess == pytest.approx(quadratic_sgd(2.0, a / 2, k, staleness), rel=0.05)


@pytest.mark.parametrize("staleness", [0.0, 1.0, 4.0])
def test_the_excess_loss_is_infinite_beyond_stability(staleness):
    share = staleness / (1 + staleness)

    def largest_root(a):
        return max(abs(np.roots([1, a * (1 - share) - 1 - share, share])))

    limit = 2 * (1 + 2 * staleness)
    assert largest_root(0.999 * limit) < 1 < largest_root(1.001 * limit)
    assert Noise(squared_norm=1.0, variance=1.0, curvature=1.0, eta=1.001 * limit).excess(1, staleness, 1.0) == inf
    assert Noise(squared_norm=1.0, variance=1.0, curvature=1.0, eta=0.999 * limit).excess(1, staleness, 1.0) < inf


@pytest.mark.parametrize("share", [1e-9, 0.2, 0.8])
def test_the_updates_to_a_loss_near_the_floor_are_those_of_the_differential_equation(share):
    P, t = 1e6, 0.0
    while P > 1:  # dP/dt = -(P^2 - f^2), f^2 = share
        dt = 1e-4 / P
        P -= dt * (P * P - share)
        t += dt
    assert relative_updates(share) == pytest.approx(t, rel=1e-3)


def test_a_loss_below_the_floor_is_never_reached():
    assert relative_updates(1.0) == relative_updates(7.0) == inf


def test_the_loss_to_go_is_exact_for_a_power_of_time():
    fall, to_go = loss_at_end([10.0 + 300 / t for t in range(1, 1201)])
    assert to_go == pytest.approx(300 / 1200, rel=0.04)  # with one standard error
    assert fall == pytest.approx(300 * (1 / 750 - 1 / 1050) / 300, rel=0.05)


def test_the_loss_to_go_is_at_most_the_loss():
    assert loss_at_end([1 - t / 100 for t in range(100)]).to_go == pytest.approx(0.13, abs=0.006)
    assert loss_at_end([-t / 100 for t in range(100)]).to_go > 0.25
    assert 0 < loss_at_end([1.0] * 8).to_go < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_the_curvature_of_a_quadratic_is_that_of_its_steps(momentum):
    rng = np.random.default_rng(1)
    h, k, w, velocity, losses, updates = 3.0, 4, np.full(5, 2.0), 0.0, [], []
    for _ in range(4000):
        gradients = h * w + rng.normal(size=(k, 5)) * 2
        plain = observed(gradients)
        velocity = momentum * velocity + gradients.mean(0)
        step, g = ETA * velocity, gradients.mean(0)
        measured = plain.gradients.step._replace(progress=float(g @ step), squared_step=float(step @ step))
        updates.append(replace(plain, gradients=plain.gradients._replace(step=measured)))
        losses.append(h * w @ w / 2)
        w = w - step
    assert energy_curvature(updates, (losses[0] - losses[-1]) / 4000) == pytest.approx(h, rel=0.1)


def test_a_run_without_steps_has_no_curvature():
    assert isnan(energy_curvature([observed(np.zeros((2, 3)))], 0.0))


def test_a_run_with_decreasing_loss_is_stable():
    wild = Noise(squared_norm=1.0, variance=1.0, curvature=100.0, eta=0.5)
    assert wild.excess(1, 0.0, 1.0) == inf
    assert wild.stable_at(0.0, 1.0).curvature == 2.0
    assert wild.stable_at(3.0, 0.5).curvature == 28.0
    assert wild.stable_at(0.0, 1e-3) == wild
