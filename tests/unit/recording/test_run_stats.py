"""The figures of a run against what its records say, counted plainly."""

from statistics import mean

import pytest

import paceline as pl
from paceline.core.records import RunEnded, UpdateMade, VersionEvaluated, WorkInterrupted
from paceline.recording.run_folder import SavedRun
from paceline.recording.run_stats import count
from selections import parametrize_few
from tiny_jobs import dataset, tiny_job

CLUSTER = pl.Cluster(4, timing=pl.timing.Exponential(1.0))
PROTOCOLS = ["bsp", "k_sync(k=2)", "backup(k=3)", "k_batch_async(k=3)", "asp", "bsp@updates=5 >> ssp(lead=1)"]


def run(protocol="k_sync(k=2)", stop="updates=40", cluster=CLUSTER, **options):
    job = tiny_job(**options.pop("job", {}))
    return pl.train(job, protocol=protocol, cluster=cluster, stop=stop, seed=3, **options)


@parametrize_few("protocol", PROTOCOLS, keep=1)
def test_run_stats_are_sums_over_the_records(protocol):
    result = run(protocol)
    figures = count(result.history)
    arrivals = result.history.of(pl.callbacks.GradientArrived)
    used = [arrival for arrival in arrivals if arrival.used]
    assert figures.updates == len(result.history.of(UpdateMade)) == 40
    assert (figures.used, figures.dropped) == (len(used), len(arrivals) - len(used))
    assert figures.interrupted == len(result.history.of(WorkInterrupted))
    assert figures.samples_applied == sum(arrival.samples for arrival in used)
    assert figures.samples_dropped == 8 * (figures.dropped + figures.interrupted)
    assert figures.mean_k == len(used) / 40
    assert figures.mean_staleness == pytest.approx(mean(arrival.staleness for arrival in used))
    assert figures.max_staleness == max(arrival.staleness for arrival in used)
    assert figures.loss == pytest.approx(mean(arrival.loss for arrival in used[-10:]))
    assert figures.time_s == result.time_s
    assert figures.worker_s == pytest.approx(4 * result.time_s)
    assert (figures.stopped_by, figures.reason) == (result.stopped_by, result.reason)


@pytest.mark.slow
def test_run_stats_from_the_log_equal_those_from_memory(tmp_path):
    run(out=tmp_path / "run")
    assert count(SavedRun(tmp_path / "run").history) == count(run().history)


def test_the_loss_is_the_one_that_ended_the_run():
    figures = count(run("bsp", "loss=1.05,updates=500", pl.Cluster(12)).history)
    assert figures.reached(pl.Stop(loss=1.05))
    assert f"mean loss {figures.loss:.6g} reached" in figures.reason


@pytest.mark.slow
def test_an_accuracy_counts_for_the_version_that_reached_it():
    everywhere = pl.plans.Duration("updates", 10)
    stop = "accuracy=0.5,updates=500"
    lossy = pl.Cluster(4, timing=pl.timing.Exponential(1.0), faults=[pl.Fault(worker=2, draw=3)])
    result = run("k_async(k=2)", stop, lossy, job={"eval_data": dataset()}, evaluate_every=everywhere)
    figures = count(result.history)
    reaching = next(each for each in result.history.of(VersionEvaluated) if each.metrics["accuracy"] >= 0.5)
    update = result.history.of(UpdateMade)[reaching.version - 1]
    assert figures.time_s == result.time_s == update.now_s
    assert figures.worker_s == update.live_s < 4 * update.now_s
    assert figures.metrics == result.metrics


def update(version):
    live_s = 2.0 * version
    return UpdateMade(
        now_s=1.0 * version,
        version=version,
        k=1,
        workload=version,
        samples=8,
        loss=1.0,
        learning_rate=0.1,
        staleness=0.0,
        max_staleness=0,
        reason="",
        busy_s=live_s,
        live_s=live_s,
    )


def test_a_late_evaluation_counts_for_its_version():
    records = [
        *[update(version) for version in (1, 2)],
        VersionEvaluated(now_s=2.5, version=1, published_s=1.0, metrics={"accuracy": 0.1}),
        *[update(version) for version in (3, 4)],
        VersionEvaluated(now_s=4.5, version=2, published_s=2.0, metrics={"accuracy": 0.6}),
        VersionEvaluated(now_s=4.5, version=4, published_s=4.0, metrics={"accuracy": 0.7}),
        RunEnded(now_s=4.5, outcome=pl.results.Outcome.ACCURACY, reason="", busy_s=9.0, live_s=9.0),
    ]
    figures = count(records)
    assert (figures.time_s, figures.worker_s, figures.metrics) == (2.0, 4.0, {"accuracy": 0.7})


def test_worker_seconds_count_the_live_workers_only():
    cluster = pl.Cluster(2, timing=pl.timing.Deterministic(1.0), faults=[pl.Fault(worker=1, draw=3)])
    figures = count(run("asp", "seconds=10", cluster).history)
    assert figures.worker_s == 10 + 3


def test_a_target_that_was_missed_is_not_reached():
    figures = count(run(stop="loss=0.01,updates=3").history)
    assert figures.stopped_by == "updates"
    assert not figures.reached(pl.Stop(loss=0.01, updates=3))
    assert figures.reached(pl.Stop(updates=3))


def test_a_running_or_interrupted_run_has_not_reached_its_target():
    records = run().history.records
    assert isinstance(records[-1], RunEnded)
    going_on = count(records[:-1])
    assert (going_on.stopped_by, going_on.reached(pl.Stop(updates=40))) == (None, False)
    assert going_on.worker_s == records[-1].live_s
    interrupted = RunEnded(
        now_s=records[-1].now_s,
        outcome=pl.results.Outcome.INTERRUPTED,
        reason="interrupted by Ctrl-C",
        busy_s=1.0,
        live_s=2.0,
    )
    assert not count([*records[:-1], interrupted]).reached(pl.Stop(updates=40))
