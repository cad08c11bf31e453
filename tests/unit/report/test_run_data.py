import numpy as np
import pytest

import paceline as pl
from paceline.core.events import Outcome
from paceline.core.records import (
    DecisionMade,
    GradientArrived,
    RunEnded,
    RunResumed,
    VersionEvaluated,
    WorkerJoined,
    WorkerLost,
    WorkInterrupted,
    WorkUnfinished,
)
from paceline.errors import PacelineWarning
from paceline.recording.run_folder import SavedRun
from paceline.report.run_data import FATES, NO_END, read_run
from paceline.report.worker_stats import activities, coverage, heat_map, round_trips, samples, staleness, worker_seconds
from selections import parametrize_few
from written_runs import arrival, begun, ended, exponential, small_job, train_run, two_updates, update, write_run

USUAL = ["asp", "pull(k=2)", "k_sync(k=2)@50% >> asp"]
OTHERS = ["bsp", "k_sync(k=2)", "k_batch_sync(k=3)", "backup(k=3)", "ssp(lead=1)", "ringmaster(r=2,stops=true)"]


@pytest.fixture(params=[*USUAL, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)], scope="module")
def saved(request, tmp_path_factory):
    return train_run(tmp_path_factory.mktemp("runs") / "run", request.param, stop=pl.Stop(gradients=60))


def fates_of(run):
    return [run.endings[ending].fate for ending in run.work["ending"]]


def test_worker_seconds_sum_to_the_live_time(saved):
    run = read_run(saved, "")
    (end,) = saved.history.of(RunEnded)
    spent = worker_seconds(run)
    assert sum(spent.values()) == pytest.approx(end.live_s)
    assert spent["idle"] == pytest.approx(end.live_s - end.busy_s, abs=1e-9)


def test_worker_seconds_and_samples_equal_the_records(saved):
    run = read_run(saved, "")
    seconds = dict.fromkeys(FATES, 0.0)
    counts = dict.fromkeys(("used", "dropped", "interrupted"), 0)
    for record in saved.history:
        match record:
            case GradientArrived(used=used):
                fate = "used" if used else "dropped"
            case WorkInterrupted():
                fate = "interrupted"
            case WorkUnfinished():
                seconds["unfinished"] += record.now_s - record.started_s
                continue
            case _:
                continue
        seconds[fate] += record.now_s - record.started_s
        counts[fate] += record.samples
    spent = worker_seconds(run)
    assert {fate: spent[fate] for fate in FATES} == pytest.approx(seconds)
    assert samples(run) == counts
    totals = saved.history.totals
    assert counts["used"] == totals.samples_used
    assert counts["dropped"] + counts["interrupted"] == totals.samples_dropped


def test_worker_activities_sum_to_the_live_time(saved):
    run = read_run(saved, "")
    did = activities(run)
    assert sum(did.values()) == pytest.approx(sum(worker_seconds(run).values()))
    arrived = list(saved.history.of(GradientArrived))
    others_s = sum(each.now_s - each.started_s for each in saved.history.of(WorkInterrupted))
    others_s += sum(each.now_s - each.started_s for each in saved.history.of(WorkUnfinished))
    assert did["computing"] == pytest.approx(sum(each.compute_s for each in arrived) + others_s)
    assert did["communicating"] == sum(each.pull_s + each.push_s for each in arrived)


@pytest.mark.slow
@parametrize_few(("protocol", "shares"), [("all_reduce", (0.4, 0.6, 0.0)), ("dc_s3gd", (2 / 3, 1 / 3, 0.0))], keep=1)
def test_only_exposed_communication_is_counted(tmp_path, protocol, shares):
    cluster = pl.Cluster(4, pl.timing.Deterministic(1.0), network=pl.timing.Network(latency_s=1.5 / 6))
    train_run(tmp_path / "run", protocol, cluster=cluster, stop=pl.Stop(updates=100))
    did = activities(read_run(SavedRun(tmp_path / "run"), ""))
    assert [part / sum(did.values()) for part in did.values()] == pytest.approx(shares, abs=0.02)


def test_staleness_is_counted_over_the_used_gradients(saved):
    counts = staleness(read_run(saved, ""))
    assert dict(zip(counts["staleness"], counts["gradients"], strict=True)) == saved.history.totals.staleness


def test_tasks_of_one_worker_do_not_overlap(saved):
    work = read_run(saved, "").work
    assert (work["end_s"] >= work["start_s"]).all()
    for worker in range(4):
        rows = work["worker"] == worker
        assert (work["start_s"][rows][1:] >= work["end_s"][rows][:-1]).all()


def test_coverage_is_the_time_per_interval_and_outcome(saved):
    run = read_run(saved, "")
    shares, slices = coverage(run, 7), np.linspace(0, run.end_s, 8)
    work, fates = run.work, fates_of(run)
    for worker, fate, column in np.ndindex(shares.shape):
        begin, end = slices[column], slices[column + 1]
        expected = sum(
            max(0.0, min(end, work["end_s"][i]) - max(begin, work["start_s"][i]))
            for i in range(len(fates))
            if work["worker"][i] == worker and fates[i] == FATES[fate]
        )
        assert shares[worker, fate, column] * (end - begin) == pytest.approx(expected, abs=1e-9)


def test_round_trips_are_quantiles_of_what_arrived(tmp_path):
    arrived = [arrival(0, draw, 10.0 * draw, 10.0 * draw + draw) for draw in range(1, 6)]
    run = read_run(write_run(tmp_path / "run", [begun(), *arrived, ended(60.0, live_s=120.0)]), "")
    first, second = round_trips(run)
    assert first.quantiles_s == pytest.approx(np.percentile([1, 2, 3, 4, 5], [5, 25, 50, 75, 95, 100]))
    assert (first.known, first.finished) == (6, 5)
    assert second is None


def test_interrupted_tasks_count_with_their_observed_time_as_lower_bound(tmp_path):
    # Worker 0 took 1 s, over 2 s, 3 s and over 4 s: S falls to 3/4 at 1 s, and by half at 3 s, where two are left.
    records = [
        begun(),
        arrival(0, 1, 0.0, 1.0),
        WorkInterrupted(now_s=3.0, worker=0, draw=2, version=0, started_s=1.0, samples=8),
        arrival(0, 3, 3.0, 6.0),
        WorkInterrupted(now_s=7.0, worker=1, draw=1, version=0, started_s=0.0, samples=8),
        WorkInterrupted(now_s=10.0, worker=0, draw=4, version=0, started_s=6.0, samples=8),
        WorkUnfinished(now_s=10.0, worker=1, draw=2, version=0, started_s=7.0),
        ended(10.0, live_s=20.0),
    ]
    first, second = round_trips(read_run(write_run(tmp_path / "run", records), ""))
    assert (first.quantiles_s, first.known, first.finished) == ([1.0, 1.0, 3.0, 4.0, 4.0, 4.0], 3, 2)
    assert (second.quantiles_s, second.known, second.finished) == ([7.0] * 6, 0, 0)


def test_the_heat_map_holds_mean_compute_times(saved):
    run = read_run(saved, "")
    heat = heat_map(run)
    cells = {}
    for record in saved.history.of(GradientArrived):
        column = min(int(record.now_s / run.end_s * heat.mean_s.shape[1]), heat.mean_s.shape[1] - 1)
        cells.setdefault((record.worker, column), []).append(record.compute_s)
    for worker, column in np.ndindex(heat.mean_s.shape):
        known = cells.get((worker, column))
        expected = np.mean(known) if known else np.nan
        assert heat.mean_s[worker, column] == pytest.approx(expected, nan_ok=True)


def test_a_gradient_that_crossed_its_interrupt_replaces_it_and_still_counts_as_interrupted(tmp_path):
    crossed = arrival(0, 1, 0.0, 2.5, used=False, crossed_interrupt=True, reason="finished after its interrupt")
    interrupted = WorkInterrupted(now_s=2.0, worker=0, draw=1, version=0, started_s=0.0, samples=8)
    records = [begun(1), interrupted, crossed, arrival(0, 2, 2.0, 3.0), update(1, 3.0, k=1), ended(3.0, 3.0)]
    run = read_run(write_run(tmp_path / "run", records), "")
    assert fates_of(run) == ["interrupted", "used"]
    assert run.endings[run.work["ending"][0]].reason == "finished after its interrupt"
    assert run.work["end_s"].tolist() == [2.0, 3.0]  # until its worker's next work began
    assert run.work["round_trip_s"].tolist() == [2.5, 1.0]


def test_a_late_return_means_that_the_worker_was_never_lost(tmp_path):
    records = [
        begun(2),
        arrival(0, 1, 0.0, 1.0),
        WorkUnfinished(now_s=5.0, worker=1, draw=1, version=0, started_s=0.0),
        WorkerLost(now_s=5.0, worker=1, reason="silent", silent=True),
        arrival(1, 1, 0.0, 7.0, used=False, reason="its worker had been declared lost"),
        WorkerJoined(now_s=7.0, worker=1, late_return=True),
        arrival(1, 2, 7.0, 8.0),
        update(1, 8.0),
        ended(8.0, 14.0),
    ]
    run = read_run(write_run(tmp_path / "run", records), "")
    assert run.live == [[(0.0, 8.0)], [(0.0, 8.0)]]
    assert worker_seconds(run) == {"used": 2.0, "dropped": 7.0, "interrupted": 0.0, "unfinished": 0.0, "idle": 7.0}


def test_a_lost_worker_has_no_idle_time(tmp_path):
    records = [
        begun(2),
        WorkUnfinished(now_s=1.0, worker=1, draw=1, version=0, started_s=0.0),
        WorkerLost(now_s=1.0, worker=1, reason="scripted fault"),
        arrival(0, 1, 0.0, 2.0),
        update(1, 2.0, k=1),
        WorkerJoined(now_s=3.0, worker=1),
        ended(4.0, 6.0),
    ]
    run = read_run(write_run(tmp_path / "run", records), "")
    assert run.live == [[(0.0, 4.0)], [(0.0, 1.0), (3.0, 4.0)]]
    assert worker_seconds(run)["idle"] == pytest.approx(3.0)
    assert [mark.reason for mark in run.marks] == ["worker 1: scripted fault", "worker 1 joined"]


def test_the_log_of_a_running_run_is_read_to_its_last_record(tmp_path):
    run = read_run(write_run(tmp_path / "run", two_updates()[:-1]), "")
    assert run.outcome == NO_END
    assert run.live == [[(0.0, 4.0)], [(0.0, 3.0)]]  # nothing is known of a worker after its last work
    assert worker_seconds(run) == {"used": 6.0, "dropped": 0.0, "interrupted": 0.0, "unfinished": 0.0, "idle": 1.0}


def test_a_truncated_line_is_skipped_with_a_warning(tmp_path):
    saved = write_run(tmp_path / "run", two_updates())
    log = tmp_path / "run/events.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    with pytest.warns(PacelineWarning, match="cut short"):
        run = read_run(saved, "")
    assert run.stats.updates == 2


def test_a_run_without_any_record_is_empty(tmp_path):
    saved = write_run(tmp_path / "run", [begun()])
    (tmp_path / "run/events.jsonl").write_bytes(b"")
    run = read_run(saved, "")
    assert (run.workers, run.end_s, len(run.work["draw"]), len(run.fates)) == (0, 0.0, 0, 0)
    assert sum(worker_seconds(run).values()) == 0


def test_a_resumed_run_has_its_new_workers(tmp_path):
    records = [
        *two_updates(),
        RunResumed(now_s=4.0, version=2, workers=3, stop_before="updates=2", changes="workers 2 -> 3"),
        arrival(2, 1, 4.0, 6.0),
        ended(6.0, 14.0),
    ]
    run = read_run(write_run(tmp_path / "run", records), "")
    assert [sum(end - begin for begin, end in spans) for spans in run.live] == [6.0, 6.0, 2.0]
    assert run.end_s == 6.0
    assert run.marks[0].reason == "resumed at version 2. workers 2 -> 3"


def test_the_quorum_decision_in_force_is_kept_with_each_update(tmp_path):
    records = [
        begun(),
        update(1, 1.0),
        DecisionMade(now_s=1.0, kind="quorum", reason="k=1: gain", k=1),
        update(2, 2.0, k=1),
        DecisionMade(now_s=3.0, kind="protocol", reason="asp: switched"),
        update(3, 3.0, k=1),
    ]
    run = read_run(write_run(tmp_path / "run", records), "")
    decided = [run.reasons[i] if i >= 0 else None for i in run.updates["quorum_reason"]]
    assert decided == [None, "k=1: gain", None]
    assert run.marks == [(3.0, 2, "protocol", "asp: switched")]


@parametrize_few("stop", [pl.Stop(updates=7), pl.Stop(accuracy=0.2), pl.Stop(loss=5)], keep=1)
def test_the_time_equals_that_of_the_result(tmp_path, stop):
    result = pl.train(small_job(), protocol="asp", cluster=exponential(), stop=stop, out=tmp_path / "run")
    run = read_run(SavedRun(tmp_path / "run"), "")
    assert run.stats.time_s == result.time_s
    assert run.outcome == result.stopped_by


def test_a_target_accuracy_is_timed_by_the_version_that_reached_it(tmp_path):
    records = [
        *two_updates()[:-1],
        VersionEvaluated(now_s=4.0, version=1, published_s=2.0, metrics={"accuracy": 0.9}),
        VersionEvaluated(now_s=4.0, version=2, published_s=4.0, metrics={"accuracy": 0.8}),
        RunEnded(now_s=4.0, outcome=Outcome.ACCURACY, reason="accuracy reached", busy_s=6.0, live_s=8.0),
    ]
    assert read_run(write_run(tmp_path / "run", records), "").stats.time_s == 2.0
