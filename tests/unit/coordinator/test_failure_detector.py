"""When a silent worker counts as lost: never in a simulation, and by the medians of round trips of real workers."""

import logging
from statistics import NormalDist, median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.failure_detector import FailureDetector, RoundTripFailureDetector
from paceline.core.events import Accept, Decision, Drop
from paceline.engines.virtual.timing import TimingEngine
from paceline.policies.estimators.round_trip_timeout import DEVIATIONS, RoundTripTimeout, RunningMedian, multiple
from paceline.protocols.protocol import as_plan
from paceline.run.simulate import _simulate_by_events
from tiny_jobs import tiny_job

# -- simulated workers

DISTRIBUTIONS = {
    "exponential": lambda mean_s: pl.Exponential(mean_s),
    "shifted": lambda mean_s: pl.ShiftedExponential(0.3 * mean_s, 0.7 * mean_s),
    "log-normal": lambda mean_s: pl.LogNormal(mean_s, 2.0),
    "Pareto": lambda mean_s: pl.Pareto(mean_s / 11, 1.1),
    "hyper-exponential": lambda mean_s: pl.HyperExponential((0.01 * mean_s, 100 * mean_s), (0.99, 0.01)),
    "deterministic": lambda mean_s: pl.Deterministic(mean_s),
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
    faults = [pl.Fault(fault[0] % n, fault[1], fault[2], fault[3] and fault[3] * unit_s)] if fault else []
    cluster = pl.Cluster(n, DISTRIBUTIONS[law](unit_s), faults=faults)
    found = []

    def observe(now, event, commands):
        found.extend(
            (type(each).__name__, each.worker)
            for each in commands
            if isinstance(each, Accept | Drop) or (isinstance(each, Decision) and each.kind == "lost")
        )

    failure_detector = FailureDetector(timeout and timeout * unit_s)
    checked = as_plan(plan).checked(n, total=None, per_epoch=None)
    TimingEngine(cluster, seed).run(
        Coordinator(checked, workers=n, stop=pl.Stop(updates=15), failure_detector=failure_detector), observe
    )
    return found


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


@pytest.mark.slow
def test_false_alarms_have_the_stated_probability():
    normal = NormalDist()
    assert 1 - normal.cdf(DEVIATIONS) < 2e-8
    assert 1 - normal.cdf(DEVIATIONS / 1.16) == pytest.approx(1e-6, rel=0.1)
    assert multiple(50) * 1.1 == pytest.approx(300)
    for count in (1, 2, 3, 10, 50):  # the next round trip against the median of so many, by its own draws
        draws = np.random.default_rng(count).standard_normal((100_000, count + 1))
        above = draws[:, -1] - np.log(np.median(np.exp(draws[:, :-1]), axis=1))
        bound = DEVIATIONS * np.sqrt(1 + np.pi / (2 * (count - 1) + np.pi))
        exceeded = np.mean(above > bound * 3 / DEVIATIONS)  # 3 deviations, as 5.5 do not occur by chance
        assert exceeded < 1.5 * (1 - normal.cdf(3))


@settings(max_examples=60, deadline=None)
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
        assert silence.of(worker) >= max(10, multiple(101) * max(of_all_s, own_s)) * 0.999


def test_the_timeout_of_a_slow_worker_uses_its_own_round_trips():
    silence = RoundTripTimeout()
    for _ in range(60):
        for worker in range(8):
            silence.observe(worker, 20.0 if worker == 3 else 1.0)
    assert silence.of(0) == silence.timeout_s == pytest.approx(275, rel=0.05)
    assert silence.of(3) == pytest.approx(20 * multiple(101))
    assert silence.of(99) == silence.timeout_s


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0])
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


def test_a_timeout_is_restored_from_a_checkpoint():
    one = RoundTripFailureDetector()
    rng = np.random.default_rng(0)
    for _ in range(130):
        one.observe(int(rng.integers(3)), float(rng.lognormal()))
    other = RoundTripFailureDetector()
    other.load_state_dict(one.state_dict())
    for _ in range(300):
        observed = int(rng.integers(3)), float(rng.lognormal()) * 3
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
