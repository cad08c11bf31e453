from math import isnan

import numpy as np
import pytest

from paceline.core.update import Step
from paceline.policies.estimators.noise import loss_to_go
from paceline.policies.estimators.noise.critical_batch import CriticalBatch, UpdateStats

NAN = float("nan")


def estimator(gradients=200, *, variance=2.0, c=10.0, offset=1.0, **reference):
    """Return an estimator after a loss of offset + c / i and gradients of this variance."""
    ours = CriticalBatch(**{"K": 16, "learning_rate": 0.1, **reference})
    for i in range(1, gradients + 1):
        accepted(ours, offset + c / i, variance, 1.0)
    return ours


def accepted(ours, loss, variance, squared_norm):
    ours.accept(variance, squared_norm)
    ours.accept_loss(loss)


def applied(ours, k, mean_square, squared_norm, progress=0.0, lr_scale=1.0, rate=0.1, gradients=None):
    ours.finish_update(
        UpdateStats(
            k=k,
            gradients=k if gradients is None else gradients,
            mean_square=mean_square,
            step=Step(
                squared_norm=squared_norm,
                progress=progress,
                squared_step=0.0,
                learning_rate=rate,
                next_learning_rate=rate,
            ),
            lr_scale=lr_scale,
        )
    )


def test_phi_follows_from_variance_and_loss_to_go():
    V, P, phi, has_fallen, assumed, _ = estimator(1000).estimate()
    assert (V, has_fallen, assumed) == (2.0, True, "")
    assert pytest.approx(10 / 1000, rel=0.02) == P
    r = 0.1 * V / (2 * 16 * P)
    assert phi == pytest.approx(16 * r / (1 - r))


def test_noise_that_fills_the_loss_to_go_is_capped():
    assert estimator(1000, variance=100.0).estimate().phi == pytest.approx(16 * 0.95 / 0.05)
    assert estimator(1000, variance=0.0).estimate().phi == 16 / 64


def test_phi_is_an_eighth_of_the_reference_at_first():
    assert estimator(23).estimate().phi == 2.0
    assert estimator(24).estimate().phi != 2.0


def test_momentum_and_schedule_multiply_the_rate():
    plain = estimator(1000, learning_rate=1e-3).estimate().phi
    assert estimator(1000, learning_rate=1e-4, momentum=0.9).estimate().phi == pytest.approx(plain)
    assert estimator(1000, learning_rate=2e-3).estimate(schedule_scale=0.5).phi == pytest.approx(plain)


def test_the_variance_comes_from_the_gradients_of_an_update():
    rng = np.random.default_rng(1)
    ours = estimator(variance=NAN)
    mean = np.array([3.0, 0.0, 0.0, 0.0])
    for _ in range(2000):
        gradients = mean + rng.standard_normal((4, 4))
        of_mean = float(np.square(gradients.mean(axis=0)).sum())
        applied(ours, 4, float(np.square(gradients).sum(axis=1).mean()), of_mean)
    assert ours.estimate().variance == pytest.approx(4.0, rel=0.05)
    assert ours.estimate().assumed == ""


def test_without_microbatches_and_with_single_gradients_the_variance_is_assumed():
    V, *_, assumed, _ = estimator(variance=NAN).estimate()
    assert V == 1.0  # the mean squared norm
    assert assumed == "the variance of a gradient is its mean squared norm"


def test_without_norms_nothing_is_known():
    ours = CriticalBatch(K=16, learning_rate=0.1)
    for _ in range(100):
        accepted(ours, 1.0, NAN, NAN)
    V, *_, phi, _, assumed, _ = ours.estimate()
    assert isnan(V)
    assert (phi, assumed) == (2.0, "the variance of a gradient is unknown")


def test_noise_that_raises_the_loss_is_not_a_loss_that_has_far_to_go():
    ours = estimator(1000)
    before = ours.estimate().to_go
    for loss in np.linspace(1.0, 0.4, 300):  # a fast fall after a rise looks like much to go
        accepted(ours, float(loss), 2.0, 1.0)
        ours.estimate()
    assert ours.estimate().to_go <= 1.5 * before


def test_the_fall_after_a_drop_of_the_rate_is_no_progress(monkeypatch):
    monkeypatch.setattr(loss_to_go, "LARGEST_RISE", 1e9)  # so that the cap does not hide the fall
    with_drop, without = estimator(1000), estimator(1000)
    before = with_drop.estimate().to_go
    applied(with_drop, 2, 1.0, 1.0, rate=0.01)
    applied(without, 2, 1.0, 1.0, rate=0.1)
    for ours in (with_drop, without):
        for _ in range(150):
            accepted(ours, 0.5, 2.0, 1.0)
    assert with_drop.estimate().to_go < 2 * before
    assert without.estimate().to_go > 5 * before


def test_a_loss_that_never_falls_is_seen():
    rng = np.random.default_rng(0)
    ours = CriticalBatch(K=4, learning_rate=0.1)
    for _ in range(500):
        accepted(ours, 1.0 + 0.1 * float(rng.standard_normal()), 1.0, 1.0)
    assert not ours.estimate().has_fallen
    assert estimator().estimate().has_fallen


@pytest.mark.parametrize(("N", "V"), [(0.0, 8.0), (4.0, 0.0), (1.0, 4.0)])
def test_the_rate_of_an_adaptive_optimizer_is_measured(N, V):
    """Adam with beta1 = 0.5 steps by 0.1 m / sqrt(N + V / k); its whole movement has the rate 0.1 / sqrt(N + V / k)."""
    K, k, mu = 4, 2, 0.5
    ours = estimator(2000, variance=V, K=K, momentum=mu, adaptive=True)
    size = (N + V / k) ** 0.5
    progress = 0.1 / size * (N + (1 - mu) * V / k)
    for _ in range(10):
        applied(ours, k, 0.0, N + V / k, progress=3.0 * progress, lr_scale=3.0)
    P = ours.estimate().to_go
    r = min(0.95, 0.1 / (N + V / K) ** 0.5 * V / (2 * K * P))
    assert ours.estimate().phi == pytest.approx(max(K / 64, K * r / (1 - r)))
    assert ours.estimate().noise_scale == pytest.approx(V / max(N, V / 256, 1e-300))


def test_an_adaptive_optimizer_without_measured_steps_is_assumed():
    assert estimator(adaptive=True).estimate().assumed == "the size of the optimizer's steps is unknown"


@pytest.mark.parametrize(("adaptive", "rate"), [(False, 0.05), (True, 0.1)])
def test_an_estimator_goes_on_from_its_state(adaptive, rate):
    first, second = estimator(300, adaptive=adaptive), CriticalBatch(16, 0.1, adaptive=adaptive)
    applied(first, 4, 3.0, 1.0, progress=0.3)
    second.load_state_dict(first.state_dict())
    for ours in (first, second):
        accepted(ours, 0.9, 2.0, 1.0)
        for squared_norm in (2.0, 4.0, 3.0, 5.0):
            applied(ours, 4, 6.0, squared_norm, progress=0.3, rate=rate)
    assert second.estimate() == first.estimate()
    assert (first.estimate().noise_scale is not None) == adaptive
    assert second.state_dict() == first.state_dict()
