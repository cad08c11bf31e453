"""Restart of long draws: times on workers that are slow at random, and what becomes of the minibatches."""

import pytest

import paceline as pl
from paceline.core.records import DecisionMade, GradientArrived, WorkInterrupted
from paceline.policies.controllers.base import Observation, Work
from paceline.policies.learning_rate import LRScaling
from selections import parametrize_few
from timed_runs import timed_run
from tiny_counting import BATCH, tallying_job
from tiny_jobs import tiny_job


def test_a_draw_that_takes_longer_is_begun_anew_at_the_newest_version():
    """Draws take 1 s, or 50 s with probability 0.3: a trial of 1.5 s takes 1 + 0.3 / 0.7 x 1.5 s in the mean."""
    cluster = pl.Cluster(1, pl.timing.Empirical((1.0,) * 7 + (50.0,) * 3))
    result = timed_run("asp + restart_after(seconds=1.5)", cluster, "updates=200")
    arrived = result.history.of(GradientArrived)
    assert {round(each.event_s - each.started_s, 9) for each in arrived} == {1.0}
    restarts = result.history.of(WorkInterrupted)
    assert {round(each.now_s - each.started_s, 6) for each in restarts} == {1.5}
    assert result.time_s == pytest.approx(200 + 1.5 * len(restarts))
    assert len(restarts) == pytest.approx(200 * 0.3 / 0.7, rel=0.3)
    assert all(each.staleness == 0 for each in arrived)


@parametrize_few(
    "protocol", ["k_sync(k=2)", "asp", "bsp + local_steps(H=2)", "bsp", "pull(k=2)", "ssp(lead=1)"], keep=1
)
def test_no_draw_of_any_protocol_takes_longer_and_every_sample_is_used_once_an_epoch(protocol):
    job = tallying_job(20 * BATCH)
    cluster = pl.Cluster(3, pl.timing.Exponential(1.0), faults=[pl.Fault(worker=1, draw=2, back_after_s=5.0)])
    plan = f"{protocol} + restart_after(seconds=2.5)"
    result = pl.train(job, protocol=plan, cluster=cluster, stop="epochs=3", seed=2)
    trips = [each.event_s - each.started_s for each in result.history.of(GradientArrived)]
    assert 2.0 < max(trips) <= 2.5 + 1e-6
    assert any(each.kind == "restart" for each in result.history.of(DecisionMade))
    assert job.data.times_used(result.history) == [3] * len(job.data)


@pytest.mark.slow
def test_a_run_on_processes_restarts_a_draw_and_replays(tmp_path):
    slow = pl.Cluster(2, [pl.timing.Deterministic(0.01), pl.timing.Empirical((0.01, 60.0))])
    cluster = pl.LocalCluster(2, slowness=slow)
    plan = "bsp + restart_after(seconds=1)"  # a busy machine takes 0.2 s for the other gradient
    result = pl.train(tiny_job(), protocol=plan, cluster=cluster, stop="updates=8", seed=3, out=tmp_path / "run")
    assert {each.worker for each in result.history.of(WorkInterrupted)} == {1}
    assert result.time_s < 30
    assert pl.replay(tmp_path / "run").is_same


def test_a_time_of_zero_is_refused():
    with pytest.raises(pl.UsageError, match="seconds=0 is not a number in"):
        pl.restart_after(seconds=0)


def test_late_in_a_long_run_a_timer_that_comes_too_early_by_rounding_restarts_the_draw():
    now, seconds = 1e7, 0.01
    work = Work(worker=0, version=0, elapsed_s=now + seconds - now - 2e-9)  # the sum is rounded
    observation = Observation(
        trigger="timer",
        now=now + seconds,
        version=0,
        opened_s=now,
        live=1,
        held=0,
        quorum=1,
        protocol=pl.asp(),
        workload=0,
        learning_rate=LRScaling(),
        in_flight=[work],
    )
    _, [restart, call] = pl.controllers.RestartAfter(seconds).decide(None, observation)
    assert isinstance(restart, pl.controllers.RestartWork)
    assert call.at_s > observation.now
