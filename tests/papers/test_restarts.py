"""Restarts from a checkpoint: the simulation against the closed form, and the best interval."""

from itertools import chain, repeat
from math import inf, sqrt
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.clusters.timing.distributions import Exponential
from papers.ddp.failing_workers import failures
from papers.ddp.patterns import Death
from papers.ddp.restarts import CheckpointRestart, best_interval_s

RUNS = 200
STANDARD_ERRORS = 5  # between a mean of so many runs and its expectation
RESTART = CheckpointRestart(interval_s=600, away_s=120, restart_s=60, write_s=15)


def run_s(work_s, *failed_s):
    return RESTART.run_s(work_s, chain(failed_s, repeat(inf)))


@pytest.mark.parametrize(("work_s", "checkpoints"), [(599, 1), (600, 1), (601, 2), (3000, 5)])
def test_without_a_failure_only_checkpoints_are_added(work_s, checkpoints):
    assert run_s(work_s) == work_s + 15 * checkpoints


@pytest.mark.parametrize(
    ("failed_s", "lost_s"),
    [
        ([0.0], 180),
        ([100.0], 100 + 180),
        ([614.0], 614 + 180),  # while the checkpoint is written
        ([615.0], 180),  # when it has been written
        ([1300.0], 1300 - 2 * 615 + 180),
        ([100.0, 200.0], 200 + 180),  # while the workers are down
        ([100.0, 290.0], 290 + 180),  # when they have worked for 10 s again
    ],
)
def test_a_failure_costs_the_work_since_the_checkpoint_and_the_restart(failed_s, lost_s):
    assert run_s(3000, *failed_s) == 3000 + 5 * 15 + lost_s


def test_the_mean_loss_is_that_of_a_failure_at_any_time():
    end_s = run_s(3000)
    lost_s = [run_s(3000, second + 0.5) - end_s for second in range(int(end_s))]
    assert fmean(lost_s) == pytest.approx(RESTART.mean_loss_s)


def test_the_death_of_the_comparison_costs_eight_minutes_of_an_hour():
    death = Death(ddp_s=30.0, updates=240)
    assert death.ddp_lost_s == pytest.approx(30 * 8 / 60)
    assert death.fault(8).back_after_s == pytest.approx(30 * 2 / 60)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    mttf_s=st.floats(60.0, 1e5),
    work=st.floats(0.5, 4.0),  # in mean times to failure, as the rest
    interval=st.floats(0.05, 1.0),
    write=st.floats(0.0, 0.3),
    away=st.floats(0.0, 0.5),
    restart=st.floats(0.0, 0.5),
    seed=st.integers(0, 10_000),
)
def test_the_mean_of_simulated_runs_is_the_closed_form(mttf_s, work, interval, write, away, restart, seed):
    ours = CheckpointRestart(interval * mttf_s, away * mttf_s, restart * mttf_s, write * mttf_s)
    runs_s = [
        ours.run_s(work * mttf_s, (failure.at_s for failure in failures(Exponential(mttf_s), 64, RUNS * seed + run)))
        for run in range(RUNS)
    ]
    error_s = stdev(runs_s) / sqrt(RUNS)
    assert abs(fmean(runs_s) - ours.expected_s(work * mttf_s, mttf_s)) < STANDARD_ERRORS * error_s


@given(mttf_s=st.floats(60.0, 1e6), write=st.floats(1e-5, 2.0), factor=st.floats(0.02, 50.0))
def test_no_interval_is_better_than_the_best_one(mttf_s, write, factor):
    def expected(interval_s):
        """Return the expected seconds for each second of work, in whole intervals."""
        return CheckpointRestart(interval_s, 0, 0, write * mttf_s).expected_s(interval_s, mttf_s) / interval_s

    best_s = best_interval_s(write * mttf_s, mttf_s)
    assert expected(best_s) <= expected(factor * best_s) * (1 + 1e-9)


@given(mttf_s=st.floats(60.0, 1e6), write=st.floats(1e-6, 1e-3))
def test_the_best_interval_is_youngs_where_writes_are_short(mttf_s, write):
    assert best_interval_s(write * mttf_s, mttf_s) == pytest.approx(sqrt(2 * write) * mttf_s, rel=0.02)
