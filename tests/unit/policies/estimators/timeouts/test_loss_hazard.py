"""Hazards of loss: the posterior mean against a numerical integral, and hazards of simulated workers."""

import numpy as np
import pytest
from scipy import integrate, stats

from paceline.policies.estimators.timeouts.loss_hazard import LossHazards, loss_hazards, pooled_hazard

HOUR_S = 3600.0


def test_the_hazard_is_the_posterior_mean():
    losses, live_s = [3, 0, 1], [5 * HOUR_S, 0.2 * HOUR_S, 2 * HOUR_S]
    prior = stats.gamma(1.0, scale=pooled_hazard(losses, live_s) * HOUR_S).pdf
    for count, live, hazard in zip(losses, live_s, loss_hazards(losses, live_s), strict=True):

        def weight(rate, count=count, hours=live / HOUR_S):
            return prior(rate) * stats.poisson.pmf(count, rate * hours)

        total, _ = integrate.quad(weight, 0, 60)
        moment, _ = integrate.quad(lambda rate, weight=weight: rate * weight(rate), 0, 60)
        assert hazard * HOUR_S == pytest.approx(moment / total, rel=1e-6)


def test_a_worker_without_live_time_has_the_hazard_of_all():
    assert loss_hazards([2, 0], [HOUR_S, 0.0])[1] == pytest.approx(pooled_hazard([2, 0], [HOUR_S, 0.0]))


def test_before_the_first_loss_hazards_are_positive_and_fall_with_the_live_time():
    early, late = loss_hazards([0, 0], [60.0, 60.0]), loss_hazards([0, 0], [HOUR_S, HOUR_S])
    assert early[0] > late[0] > 0


def test_the_prior_is_one_loss_in_ten_hours_and_counts_as_half_a_loss():
    assert loss_hazards([0, 0], [0.0, 0.0]) == [pytest.approx(0.1 / HOUR_S)] * 2
    assert pooled_hazard([0, 0], [5 * HOUR_S, 0.0]) == pytest.approx(0.05 / HOUR_S)
    assert pooled_hazard([1000], [1000 * HOUR_S]) == pytest.approx(1 / HOUR_S, rel=0.01)


def test_the_estimate_is_nearer_to_the_true_hazards_than_the_pooled_one_and_that_of_each_worker_alone():
    rng = np.random.default_rng(1)
    hours = np.full(16, 20.0)
    true = np.repeat([0.05, 0.4], 8)  # machines on demand, and spot machines, in losses an hour
    errors = {"own": 0.0, "pooled": 0.0, "both": 0.0}
    for _ in range(200):
        losses = rng.poisson(true * hours)
        errors["own"] += np.square(losses / hours - true).mean()
        errors["pooled"] += np.square(pooled_hazard(losses, hours * HOUR_S) * HOUR_S - true).mean()
        errors["both"] += np.square(np.array(loss_hazards(losses, hours * HOUR_S)) * HOUR_S - true).mean()
    assert errors["both"] < errors["own"]
    assert errors["both"] < errors["pooled"] / 2


def test_hazards_of_a_run_equal_those_of_its_counts_and_follow_after_each_loss_and_100_round_trips():
    hazards, rng = LossHazards(), np.random.default_rng(2)
    losses, live_s = [0, 0, 0], [0.0, 0.0, 0.0]
    for _ in range(600):
        worker, round_trip_s = int(rng.integers(3)), float(rng.exponential(60.0))
        hazards.add_round_trip(worker, round_trip_s)
        live_s[worker] += round_trip_s
    found = [hazards.of(worker) for worker in range(3)]
    assert found == pytest.approx(loss_hazards(losses, live_s))
    for worker in (1, 1, 0):
        hazards.add_loss(worker)
        losses[worker] += 1
        assert [hazards.of(worker) for worker in range(3)] == pytest.approx(loss_hazards(losses, live_s))
        assert hazards.largest == hazards.of(1)
    hazards.add_round_trip(0, 1e9)
    assert hazards.of(0) == pytest.approx(loss_hazards(losses, live_s)[0])
    assert hazards.of(99) == pytest.approx(pooled_hazard(losses, live_s))
