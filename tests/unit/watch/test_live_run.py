"""The bounded data of a run have the numbers of its report, however the records arrive."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.core.records import DecisionMade, VersionEvaluated, WorkerJoined, WorkerLost, WorkInterrupted
from paceline.report import worker_stats
from paceline.report.curves import groups, switches
from paceline.report.run_data import read_run
from paceline.report.stragglers import stragglers
from paceline.watch import live_run
from paceline.watch.live_run import LiveRun
from paceline.watch.live_view import LiveView
from selections import parametrize_few
from written_runs import arrival, begun, ended, train_run, update, write_run

RUNS = {
    "k_sync(k=2)@50% >> asp": {"stop": pl.Stop(gradients=200)},
    "k_batch_async(k=3)": {},
    "bsp": {},
    "k_sync(k=2)": {},
    "asp": {},
    "bsp + elastic": {
        "cluster": pl.Cluster(
            4, pl.timing.Exponential(mean_s=1.0), transient=pl.timing.Transient(mean_on_s=5, mean_off_s=5, slowdown=9)
        )
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that returns the run of a protocol."""
    folder = tmp_path_factory.mktemp("runs")
    return cache(lambda protocol: train_run(folder / protocol, protocol, updates=60, **RUNS[protocol]))


def followed(saved, batches=(7,)):
    live, records, begin = LiveRun(saved), saved.history.records, 0
    while begin < len(records):
        for length in batches:
            live.add(records[begin : begin + length])
            begin += length
    return live


@pytest.fixture(
    params=[6, pytest.param(100, marks=pytest.mark.slow)], ids=["few tasks are recent", "all tasks are recent"]
)
def kept_tasks(request, monkeypatch):
    monkeypatch.setattr(live_run, "KEPT_TASKS", request.param)
    return request.param


@parametrize_few("protocol", RUNS, keep=1)
def test_the_sums_are_those_of_the_report(saved, protocol, kept_tasks):
    run, live = read_run(saved(protocol), ""), followed(saved(protocol), (3, 50, 1))
    view = LiveView(live)
    assert view.worker_seconds == pytest.approx(worker_stats.worker_seconds(run))
    assert view.activities == pytest.approx(worker_stats.activities(run))
    assert live.sums(view.recent).samples_by_fate() == worker_stats.samples(run)
    assert live.staleness() == worker_stats.staleness(run)
    assert view.recent.stats == run.stats
    tasks, used = live.counts(view.recent)
    assert tasks.tolist() == np.bincount(run.work["worker"], minlength=run.workers).tolist()
    assert used.sum() == run.stats.used
    assert max(np.bincount(view.recent.work["worker"])) <= kept_tasks


@parametrize_few("protocol", RUNS, keep=1)
def test_the_curves_are_those_of_the_report(saved, protocol):
    run, live = read_run(saved(protocol), ""), followed(saved(protocol))
    [group] = groups([run])
    progress, accuracy = live.progress.columns(), live.metrics["accuracy"].columns()
    for axis in ("time", "updates", "workload"):
        for panel in ("loss", "k"):
            line = group.lines[axis][panel]
            assert progress[axis].tolist() == line.x.tolist()
            assert progress[panel] == pytest.approx(line.mean)
        assert accuracy[axis].tolist() == group.lines[axis]["accuracy"].x.tolist()


def test_the_switches_are_those_of_the_report(saved):
    run = saved("k_sync(k=2)@50% >> asp")
    live = followed(run, (1,))
    assert [switch._asdict() for switch in live.switches] == switches(read_run(run, "")) != []
    assert live.first_protocol.endswith("the run begins")


def test_a_straggler_is_named_by_recent_round_trips_and_all_contributions(tmp_path, kept_tasks):
    slow = pl.Cluster(4, (*[pl.timing.Deterministic(1.0)] * 3, pl.timing.Deterministic(4.0)))
    saved = train_run(tmp_path / "run", "asp", updates=50, cluster=slow)
    assert LiveView(followed(saved)).stragglers == stragglers(read_run(saved, ""))
    assert LiveView(followed(saved)).stragglers[0].startswith("worker 3 was 4.0 x slower than the median")
    synchronous = train_run(tmp_path / "bsp", "bsp", updates=50, cluster=slow)
    assert LiveView(followed(synchronous)).stragglers == stragglers(read_run(synchronous, ""))
    assert LiveView(followed(synchronous)).stragglers[0].endswith("updates waited 150 s for it alone, 75% of the time")


def test_a_gradient_that_crossed_its_interrupt_is_counted_once(tmp_path):
    crossed = arrival(0, 1, 0.0, 2.5, used=False, crossed_interrupt=True, reason="finished after its interrupt")
    records = [begun(1), WorkInterrupted(now_s=2.0, worker=0, draw=1, version=0, started_s=0.0, samples=8), crossed]
    records += [arrival(0, 2, 2.0, 3.0), update(1, 3.0, k=1), ended(3.0, 3.0)]
    saved = write_run(tmp_path / "run", records)
    view = LiveView(followed(saved, (1,)))
    assert view.worker_seconds == pytest.approx(worker_stats.worker_seconds(read_run(saved, "")))


def size_of(live):
    """Return how many numbers and texts the accumulator holds."""
    reader = live._reader
    parts = [reader.work, reader.updates, reader.losses, reader.evaluations, reader.rates, reader.marks]
    parts += [reader.endings, reader.reasons, live.progress, live.rates, live.switches, *live.metrics.values()]
    return sum(map(len, parts)) + sum(map(len, reader.live.values()))


def long_run(updates, workers, seed):
    """Yield the records of an invented run with all that can grow: reasons, decisions, joins, metrics."""
    random = np.random.default_rng(seed)
    yield begun(workers)
    for number in range(1, updates + 1):
        now_s = float(number)
        for worker in range(workers):
            used = bool(random.random() < 0.7)
            reason = "" if used else f"staleness {number} is too large"
            yield arrival(worker, number, now_s - 0.5, now_s, used=used, reason=reason, staleness=int(used))
        yield DecisionMade(now_s=now_s, kind="quorum", reason=f"k={workers}: at {number}", k=workers)
        yield DecisionMade(now_s=now_s, kind="protocol", reason=f"asp: again {number}")
        yield update(number, now_s, k=workers, reason=f"quorum reached at {number}")
        yield WorkerLost(now_s=now_s, worker=0, reason="gone")
        yield WorkerJoined(now_s=now_s, worker=0)
        yield VersionEvaluated(now_s=now_s, version=number, published_s=now_s, metrics={"nll": 1.0})


@settings(max_examples=6)
@given(workers=st.integers(1, 5), batch=st.integers(1, 400), seed=st.integers(0, 9))
def test_the_size_is_bounded(workers, batch, seed):
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("KEPT_TASKS", "KEPT_UPDATES", "KEPT_MARKS", "KEPT_SPANS", "KEPT_TEXTS"):
            patch.setattr(live_run, name, 5)
        live = LiveRun(Unsaved())
        live.progress = live_run.MergedPoints(live_run.AXES, ("loss", "k", "staleness"), 10)
        live.metrics["nll"] = live_run.MergedPoints(live_run.AXES, ("value",), 10)
        records = list(long_run(120, workers, seed))
        for begin in range(0, len(records), batch):
            live.add(records[begin : begin + batch])
            sizes.append(size_of(live))
    assert max(sizes) <= 2 * 5 * (11 * workers + 7) + 15 * workers + 90
    assert max(map(len, live._reader.live.values())) <= 5
    assert live.updates == 120
    assert live.marks == 3 * 120


def test_the_live_time_of_forgotten_intervals_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(live_run, "KEPT_SPANS", 3)
    saved = write_run(tmp_path / "run", [*long_run(30, 2, seed=0), ended(31.0, 62.0)])
    live, run = followed(saved, (1,)), read_run(saved, "")
    assert live.live_times(live.data()) == worker_stats.live_times(run) == [31.0, 31.0]
    hazards = worker_stats.worker_losses(run.losses_of_workers, [31.0, 31.0])
    assert LiveView(live).losses == hazards
    assert [(row.worker, row.losses) for row in hazards] == [(0, 30)]


class Unsaved:
    def __init__(self):
        self.configuration = {"workers": 2, "protocol": "asp"}


def test_reasons_survive_when_others_are_forgotten(monkeypatch):
    for name in ("KEPT_TASKS", "KEPT_UPDATES", "KEPT_TEXTS"):
        monkeypatch.setattr(live_run, name, 3)
    live = LiveRun(Unsaved())
    for record in long_run(50, 2, seed=0):
        live.add([record])
    recent = live.data()
    texts = [recent.reasons[number] for number in recent.updates["reason"]]
    assert texts == [f"quorum reached at {number}" for number in range(51 - len(texts), 51)]
    assert LiveView(live).quorum == "update 50: k = 2, quorum reached at 50"
    reasons = {recent.endings[ending].reason for ending in recent.work["ending"]}
    assert reasons <= {"", *(f"staleness {number} is too large" for number in (48, 49, 50))}
    assert len(recent.endings) <= 10


def test_the_grid_of_compute_times_keeps_all_sums(saved):
    run, live = read_run(saved("asp"), ""), followed(saved("asp"))
    heat = live.heat_map()
    assert heat.mean_s.shape[0] == run.workers
    assert heat.end_s >= run.end_s
    assert np.nansum(live._grid._sums) == pytest.approx(np.nansum(run.work["compute_s"]))
    measured = run.work["worker"] == 2
    cells = heat.mean_s[2][np.isfinite(heat.mean_s[2])]
    assert run.work["compute_s"][measured].min() <= cells.min() <= cells.max() <= run.work["compute_s"][measured].max()
