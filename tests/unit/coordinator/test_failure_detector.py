"""When a silent worker counts as lost: never in a simulation, and by the medians of round trips of real workers."""

import logging
from statistics import NormalDist, median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from coordinator_harness import coordinator
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.failure_detector import FailureDetector, RoundTripFailureDetector
from paceline.core.events import NOT_JOINED, PAUSE, Accept, Decision, Drop, Lost
from paceline.engines.virtual.timing import TimedWorkers
from paceline.policies.estimators.timeouts.round_trip_timeout import (
    MOST_SIGMA,
    RoundTripTimeout,
    RunningMedian,
    false_alarm_probability,
    multiple,
)
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import as_plan
from paceline.run.simulate import _simulate_by_events
from selections import parametrize_few
from tiny_jobs import tiny_job

# -- simulated workers

DISTRIBUTIONS = {
    "exponential": lambda mean_s: pl.timing.Exponential(mean_s),
    "shifted": lambda mean_s: pl.timing.ShiftedExponential(0.3 * mean_s, 0.7 * mean_s),
    "log-normal": lambda mean_s: pl.timing.LogNormal(mean_s, 2.0),
    "Pareto": lambda mean_s: pl.timing.Pareto(mean_s / 11, 1.1),
    "hyper-exponential": lambda mean_s: pl.timing.HyperExponential((0.01 * mean_s, 100 * mean_s), (0.99, 0.01)),
    "deterministic": lambda mean_s: pl.timing.Deterministic(mean_s),
}


def check_that_bsp_waits_for_all(seeds, updates=20):
    for law in DISTRIBUTIONS.values():
        for mean_s in (0.001, 1.0, 1000.0):
            cluster = pl.Cluster(2, law(mean_s))
            for seed in seeds:
                found = pl.simulate("bsp", cluster, updates=updates, seed=seed)
                by_events = _simulate_by_events(as_plan(pl.bsp()), cluster, pl.Stop(updates=updates), seed, 0)
                for each in (found, by_events):
                    assert (each.totals.updates, each.totals.mean_k) == (updates, 2.0), (law, mean_s, seed)


def test_bsp_waits_for_all_under_any_distribution_and_unit_of_time():
    check_that_bsp_waits_for_all(range(10))


@pytest.mark.slow
def test_bsp_waits_for_all_under_any_distribution_and_unit_of_time_in_200_seeds():
    check_that_bsp_waits_for_all(range(200))


@pytest.mark.parametrize("seed", [19, 46])
def test_runs_without_faults_lose_no_worker(seed):
    assert pl.simulate("bsp", "2*exp(mean=100)", updates=20, seed=seed).totals.mean_k == 2.0


def decisions(plan, n, law, seed, unit_s, timeout, fault):
    """Return who was accepted or dropped, and who was lost, in order."""
    faults = (
        [pl.Fault(worker=fault[0] % n, draw=fault[1], kind=fault[2], back_after_s=fault[3] and fault[3] * unit_s)]
        if fault
        else []
    )
    cluster = pl.Cluster(n, DISTRIBUTIONS[law](unit_s), faults=faults)
    found = []

    def observe(now, event, commands):
        found.extend(
            (type(each).__name__, each.worker)
            for each in commands
            if isinstance(each, Accept | Drop) or (isinstance(each, Decision) and each.kind == "lost")
        )

    failure_detector = FailureDetector(timeout and timeout * unit_s)
    checked = checked_plan(as_plan(plan), n, total=None, per_epoch=None)
    TimedWorkers(cluster, seed).loop().run(
        Coordinator(checked, workers=n, stop=pl.Stop(updates=15), failure_detector=failure_detector), observe
    )
    return found


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    plan=st.sampled_from([pl.bsp(), pl.k_sync(2), pl.k_batch_async(3), pl.asp(), pl.ssp(1)]),
    n=st.integers(3, 6),
    law=st.sampled_from(sorted(set(DISTRIBUTIONS) - {"deterministic"})),  # ties are broken by rounding
    seed=st.integers(0, 999),
    timeout=st.sampled_from([None, 0.5, 3.0]),
    fault=st.none()
    | st.tuples(
        st.integers(0, 5),
        st.integers(1, 4),
        st.sampled_from(["die", "hang", "not_finite"]),
        st.sampled_from([None, 2.0]),
    ),
)
def test_decisions_do_not_depend_on_the_unit_of_time(plan, n, law, seed, timeout, fault):
    seconds = decisions(plan, n, law, seed, 1.0, timeout, fault)
    for unit_s in (0.001, 1000.0):
        assert decisions(plan, n, law, seed, unit_s, timeout, fault) == seconds


# -- real workers: the timeout


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 9))
def test_the_running_median_equals_the_median_of_the_latest_values(values, size):
    running = RunningMedian(size)
    for value in values:
        running.add(value)
    assert running.value == RunningMedian(size, values).value == median(values[-size:])


def test_a_false_alarm_is_as_probable_as_stated():
    for probability in (1e-6, 1e-4, 1e-2):
        z = np.log(multiple(10**9, probability)) / MOST_SIGMA  # the median is known exactly
        assert 1 - NormalDist().cdf(z) == pytest.approx(probability, rel=1e-3)
    assert 1 - NormalDist().cdf(np.log(multiple(10**9))) < 2e-8
    assert 290 < multiple(50) * 1.1 < 300


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 10, 50])
def test_false_alarms_have_the_stated_probability_after_few_round_trips(count):
    draws = MOST_SIGMA * np.random.default_rng(count).standard_normal((400_000, count + 1))
    above = draws[:, -1] - np.log(np.median(np.exp(draws[:, :-1]), axis=1))
    for probability in (1e-2, 1e-3):
        assert np.mean(above > np.log(multiple(count, probability))) < 1.5 * probability


def test_a_hundred_losses_allow_one_false_alarm():
    per_hour = 1 / 3600
    assert false_alarm_probability(10 * per_hour, 3.6) == pytest.approx(0.01 * 0.01)
    assert false_alarm_probability(0.1 * per_hour, 1.0) == 1e-6
    assert false_alarm_probability(1.0, 1e9) == 0.01


def test_a_worker_that_is_lost_often_has_a_shorter_timeout():
    silence = RoundTripTimeout()
    for _ in range(200):
        for worker in range(4):
            silence.observe(worker, 9.0)
    before_s = silence.of(0)
    for _ in range(10):
        silence.hazards.add_loss(2)
    silence.observe(0, 9.0)
    hazard = silence.hazards.of(2)
    assert silence.hazards.largest == hazard == pytest.approx(11 / (1800 + (18_000 + 7200) / 10.5), rel=0.01)
    assert silence.of(2) / 9 == pytest.approx(multiple(101, 0.01 * 9 * hazard), rel=0.1)
    assert silence.of(2) < silence.of(0) < before_s


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e4), min_size=50, max_size=150),
    st.integers(1, 5),
)
def test_after_50_round_trips_the_timeout_is_10_s_or_at_most_300_medians(round_trips_s, n):
    silence = RoundTripTimeout()
    for number, round_trip_s in enumerate(round_trips_s):
        silence.observe(number % n, round_trip_s)
    of_all_s = median(round_trips_s[-101:])
    for worker in range(n):
        own_s = median(round_trips_s[worker::n][-21:])
        assert 10 <= silence.timeout_s <= silence.of(worker) <= max(10, 300.001 * max(of_all_s, own_s))
        most_likely = multiple(101, 0.01)
        assert silence.of(worker) >= max(10, most_likely * max(of_all_s, own_s)) * 0.999


def test_the_timeout_of_a_slow_worker_uses_its_own_round_trips():
    silence = RoundTripTimeout()
    for _ in range(60):
        for worker in range(8):
            silence.observe(worker, 20.0 if worker == 3 else 1.0)
    assert silence.of(0) == silence.timeout_s == pytest.approx(275, rel=0.05)
    assert silence.of(3) == pytest.approx(20 * multiple(101, false_alarm_probability(silence.hazards.of(3), 20.0)))
    assert silence.of(99) == silence.timeout_s


@parametrize_few("sigma", [0.1, 0.5, 1.0], keep=1)
def test_a_slow_worker_in_a_cluster_is_never_lost(sigma):
    rng = np.random.default_rng(4)
    lost = 0
    for _ in range(40):
        silence = RoundTripTimeout()
        for _ in range(40):
            for worker, slow in enumerate((1.0, 1.0, 1.0, 20.0)):
                round_trip_s = slow * float(np.exp(sigma * rng.standard_normal()))
                lost += round_trip_s >= silence.of(worker)
                silence.observe(worker, round_trip_s)
    assert lost == 0


@pytest.mark.parametrize(("reason", "losses"), [("killed by SIGKILL", 1), (NOT_JOINED, 0), (PAUSE, 0)])
def test_a_loss_by_intention_does_not_shorten_the_timeout(reason, losses):
    detector, expected = RoundTripFailureDetector(), RoundTripFailureDetector()
    for _ in range(losses):
        expected.add_loss(1)
    driven = coordinator(pl.asp(), 2, failure_detector=detector)
    driven.begin()
    driven.handle(Lost(1.0, 1, reason))
    assert detector.state_dict()["round_trips"] == expected.state_dict()["round_trips"]


def test_a_timeout_is_restored_from_a_checkpoint():
    one = RoundTripFailureDetector()
    rng = np.random.default_rng(0)
    for _ in range(130):
        one.observe(int(rng.integers(3)), float(rng.lognormal(3.0)))
        if rng.random() < 0.1:
            one.add_loss(int(rng.integers(3)))
    other = RoundTripFailureDetector()
    other.load_state_dict(one.state_dict())
    for _ in range(300):
        observed = int(rng.integers(3)), float(rng.lognormal(3.0)) * 3
        assert one.observe(*observed) == other.observe(*observed)
        assert one.state_dict() == other.state_dict()
    assert [one.timeout_of(worker) for worker in range(4)] == [other.timeout_of(worker) for worker in range(4)]


def test_a_derived_timeout_after_a_fixed_one_starts_without_observations():
    failure_detector = RoundTripFailureDetector()
    failure_detector.load_state_dict(FailureDetector(60.0).state_dict())
    assert failure_detector.timeout_s == np.inf
    assert failure_detector.observe(0, 1.0) != ""


def test_a_real_run_logs_its_timeout_and_a_simulated_one_has_none(caplog, tmp_path):
    caplog.set_level(logging.INFO, "paceline.run")
    pl.train(tiny_job(), protocol="bsp", cluster="2*exp(mean=1)", stop="updates=3", out=tmp_path / "simulated")
    assert not any("timeout" in each for each in caplog.messages)
    pl.train(tiny_job(), protocol="bsp", cluster="local:2", stop="updates=9", out=tmp_path / "real")
    timeouts = [each for each in caplog.messages if each.startswith("worker timeout: ")]
    assert 1 <= len(timeouts) <= 9
    for name in ("simulated", "real"):
        assert pl.replay(tmp_path / name).difference == ""
