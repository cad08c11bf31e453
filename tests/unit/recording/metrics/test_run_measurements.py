"""Measurements of a run: outcomes of gradients, and a bounded number of workers."""

import pytest

import paceline as pl
from paceline.coordinator import admission
from paceline.core import records
from paceline.core.gradient import OLD_DRAW
from paceline.recording.history import Totals
from paceline.recording.metrics.network_counters import NetworkCounters
from paceline.recording.metrics.run_measurements import MAX_WORKERS, RunMeasurements


def arrived(worker=0, reason="", started_s=1.0, event_s=3.0):
    numbers = {"loss": 0.5, "samples": 8, "squared_norm": 1.0, "pull_s": 0.0, "compute_s": 2.0, "push_s": 0.0}
    return pl.callbacks.GradientArrived(
        now_s=9.0,
        worker=worker,
        draw=1,
        version=0,
        started_s=started_s,
        staleness=2,
        used=not reason,
        reason=reason,
        crossed_interrupt=reason == OLD_DRAW,
        event_s=event_s,
        **numbers,
    )


@pytest.fixture
def run():
    return RunMeasurements(Totals(), NetworkCounters())


REASONS = {
    admission.STALE: "stale",
    admission.LATE_RETURN: "late",
    admission.PROBE: "probe",
    "not finite": "not_finite",
    "its loop skipped the step": "skipped",
    "a reason of a later version": "other",
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_dropped_gradient_counts_by_its_reason(run, reason):
    run.add(arrived(reason=reason))
    assert {outcome for outcome, count in run.dropped.items() if count} == {REASONS[reason]}


def test_a_gradient_that_crossed_its_interrupt_is_none_that_was_dropped(run):
    run.add(arrived(reason=OLD_DRAW))
    assert sum(run.dropped.values()) == 0
    assert sum(run.round_trips[0].counts) == 1


def test_workers_beyond_the_limit_share_a_label(run):
    for worker in range(MAX_WORKERS - 1, MAX_WORKERS + 3):
        run.add(arrived(worker))
    assert {label: sum(times.counts) for label, times in run.round_trips.items()} == {999: 1, MAX_WORKERS: 3}


def test_a_round_trip_ends_with_the_event_and_falls_into_the_bucket_of_its_bound(run):
    run.add(arrived(started_s=1.0, event_s=2.0))
    times = run.round_trips[0]
    assert times.sum == 1.0
    assert times.counts[times.bounds.index(1.0)] == 1


def test_live_workers_follow_the_membership(run):
    run.add(records.RunStarted(0.0, 3, ""))
    run.add(records.WorkerLost(now_s=1.0, worker=1, reason="gone"))
    run.add(records.WorkerJoined(now_s=2.0, worker=5))
    assert (run.live, run.lost_workers) == ({0, 2, 5}, 1)
    run.add(records.RunResumed(now_s=3.0, version=0, workers=2, stop_before="", changes=""))
    assert run.live == {0, 1}
