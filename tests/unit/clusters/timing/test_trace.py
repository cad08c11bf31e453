"""Traces: extraction from runs, files, replay by draw and by time, invalid files."""

import warnings
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from catalogue_table import TABLE
from paceline.clusters.parser import load_cluster, parse_cluster
from paceline.clusters.timing.trace import TraceRow
from paceline.core.records import WorkInterrupted, WorkUnfinished
from paceline.errors import PacelineWarning
from paceline.protocols.protocol import as_plan
from paceline.recording.event_log import to_line
from paceline.recording.history import History
from paceline.recording.run_folder import SavedRun
from selections import parametrize_few
from tiny_jobs import tiny_job
from trace_rows import CENSORED, CLUSTER, replayed, row, rows_of, trained


def log_of(result):
    return [to_line(record) for record in result.history]


# -- the same run again
@parametrize_few(
    "protocol",
    [
        pytest.param(each, id=str(each), marks=() if not at % 3 else pytest.mark.slow)
        for at, (_, each, _) in enumerate(TABLE)
        if not as_plan(each).sets_shares
    ],
    keep=1,
)
def test_a_trace_replayed_under_the_same_protocol_gives_the_same_run(protocol, tmp_path):
    run = trained(protocol, CLUSTER, updates=20)
    pl.timing.Trace.of(run).to_csv(tmp_path / "trace.csv")
    trace = pl.timing.Trace.from_csv(tmp_path / "trace.csv")
    assert log_of(trained(protocol, pl.Cluster(4, trace), updates=20)) == log_of(run)


@pytest.mark.slow
def test_a_trace_of_shares_has_the_times_of_whole_minibatches(tmp_path):
    cluster = pl.Cluster(
        4, pl.timing.LogNormal(1.0, 0.1), speed=[1, 1, 1, 0.5], network=pl.timing.Network(latency_s=0.1)
    )
    run = trained("balanced(m=4, leases=1)", cluster, updates=30)
    assert len({record.samples for record in run.history.of(pl.callbacks.GradientArrived)}) > 1
    pl.timing.Trace.of(run).to_csv(tmp_path / "trace.csv")
    recorded = pl.Cluster(4, pl.timing.Trace.from_csv(tmp_path / "trace.csv"))
    for protocol in ("balanced(m=4, leases=1)", "bsp"):
        replayed, own = (pl.simulate(protocol, each, updates=30, seed=5).time_s for each in (recorded, cluster))
        assert replayed == pytest.approx(own)


@pytest.mark.parametrize("server", [pl.timing.ServerTime(gradient_s=0.1), pl.timing.ServerTime(update_s=0.4)], ids=str)
@parametrize_few("protocol", [pl.bsp(), pl.asp(), pl.k_sync(k=3), pl.k_batch_async(k=3)], keep=1, ids=str)
def test_the_service_time_of_the_server_is_in_the_trace(protocol, server):
    run = trained(protocol, replace(CLUSTER, server=server), updates=40)
    trace = pl.timing.Trace.of(run)
    simulated_s = pl.simulate(protocol, pl.Cluster(4, trace), updates=40).time_s
    assert simulated_s == pytest.approx(run.history.of(pl.callbacks.UpdateMade)[-1].now_s, rel=1e-9)


@pytest.mark.parametrize(
    "protocol",
    [
        pl.asp(),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (pl.k_sync(k=2), pl.ringmaster(r=2, stops=True))),
    ],
    ids=str,
)
def test_a_replay_of_real_workers_takes_as_long_as_they_did(protocol, tmp_path):
    slowness = pl.Cluster(
        3, [pl.timing.Deterministic(0.002), pl.timing.Exponential(0.004), pl.timing.Deterministic(0.02)]
    )
    run = trained(protocol, pl.LocalCluster(3, slowness=slowness), updates=60, out=tmp_path / "run")
    trace = pl.timing.Trace.of(SavedRun(tmp_path / "run"))
    ends_s = [each.now_s for each in run.history.of(pl.callbacks.GradientArrived)]
    assert ends_s == sorted(set(ends_s))  # two at the same moment might change places in the replay
    assert min(each.waited_s for each in trace.rows) > -1e-9  # the parts fit between start and end
    simulated_s = pl.simulate(protocol, pl.Cluster(3, trace), updates=60).time_s
    assert simulated_s == pytest.approx(run.history.of(pl.callbacks.UpdateMade)[-1].now_s, rel=1e-6)


@pytest.mark.slow
# -- what is extracted
def test_a_trace_has_a_row_for_each_task():
    run = trained(pl.k_sync(k=3), CLUSTER)
    trace = pl.timing.Trace.of(run)
    gone = [*run.history.of(WorkInterrupted), *run.history.of(WorkUnfinished)]
    assert len(trace.rows) == len(run.history.of(pl.callbacks.GradientArrived)) + len(gone)
    assert trace.censored_rows == len(gone) > 0
    assert [(each.worker, each.draw) for each in trace.rows] == sorted((each.worker, each.draw) for each in trace.rows)
    for arrival in run.history.of(pl.callbacks.GradientArrived):
        times = (arrival.started_s, arrival.pull_s, arrival.compute_s, arrival.push_s, arrival.now_s)
        assert TraceRow(arrival.worker, arrival.draw, *times, censored=0) in trace.rows


def arrival(now_s, draw, started_s, **changes):
    times = {"pull_s": 0.25, "compute_s": 0.5, "push_s": 0.25, **changes}
    return pl.callbacks.GradientArrived(
        now_s=now_s,
        worker=0,
        draw=draw,
        version=0,
        started_s=started_s,
        staleness=0,
        used=True,
        reason="",
        loss=1.0,
        samples=8,
        squared_norm=1.0,
        **times,
    )


def test_a_run_with_local_steps_is_refused():
    result = pl.train(tiny_job(), protocol="bsp + local_steps(H=3)", cluster=pl.Cluster(2), stop="updates=3")
    with pytest.raises(pl.UsageError, match="a round trip has the time of 3 gradients"):
        pl.timing.Trace.of(result)


def test_late_arrivals_are_not_censored():
    history = History(
        lambda: [
            WorkInterrupted(now_s=3.0, worker=0, draw=1, version=0, started_s=2.0, samples=8),
            WorkInterrupted(now_s=3.5, worker=0, draw=2, version=0, started_s=3.0, samples=8),
            arrival(4.0, draw=1, started_s=2.0, crossed_interrupt=True),
            WorkUnfinished(now_s=9.0, worker=0, draw=3, version=0, started_s=5.0),
            arrival(10.0, draw=3, started_s=5.0),  # late return
        ]
    )
    assert pl.timing.Trace.of(history).rows == (
        TraceRow(worker=0, draw=1, start_s=2.0, pull_s=0.25, compute_s=0.5, push_s=0.25, end_s=4.0, censored=0),
        TraceRow(worker=0, draw=2, start_s=3.0, pull_s=0.0, compute_s=0.5, push_s=0.0, end_s=3.5, censored=1),
        TraceRow(worker=0, draw=3, start_s=5.0, pull_s=0.25, compute_s=0.5, push_s=0.25, end_s=10.0, censored=0),
    )


def test_a_notice_counts_with_the_transfer_of_its_gradient():
    history = History(lambda: [arrival(3.0, draw=1, started_s=2.0, push_s=0.125, unsent_s=0.5)])
    assert pl.timing.Trace.of(history).rows == (
        TraceRow(worker=0, draw=1, start_s=2.0, pull_s=0.25, compute_s=0.5, push_s=0.625, end_s=3.5, censored=0),
    )


seconds = st.floats(0, 1e6, allow_subnormal=False)


@given(st.lists(st.tuples(seconds, seconds, seconds, seconds, seconds, st.booleans()), min_size=1, max_size=5))
def test_a_trace_file_preserves_every_digit(tmp_path_factory, times):
    rows = [TraceRow(worker=0, draw=9, start_s=0.0, pull_s=0.0, compute_s=1.0, push_s=0.0, end_s=1.0, censored=0)]
    for draw, (start_s, pull_s, compute_s, push_s, waited_s, censored) in enumerate(times, start=10):
        end_s = start_s + (pull_s + compute_s + push_s) + waited_s + 1e-3
        rows.append(
            TraceRow(
                worker=0,
                draw=draw,
                start_s=start_s,
                pull_s=pull_s,
                compute_s=compute_s,
                push_s=push_s,
                end_s=end_s,
                censored=int(censored),
            )
        )
    file = tmp_path_factory.mktemp("trace") / "trace.csv"
    trace = pl.timing.Trace(rows)
    trace.to_csv(file)
    assert pl.timing.Trace.from_csv(file) == trace
    assert file.read_text().splitlines()[0] == "worker,draw,start_s,pull_s,compute_s,push_s,end_s,censored"


# -- which row is replayed
def test_replay_by_draw_uses_the_row_of_the_draw():
    trace = pl.timing.Trace([*rows_of([3.0, 1.0, 2.0]), *rows_of([5.0], worker=1)])
    assert replayed(trace, (0, 2, 77.0), (0, 1, 0.5), (1, 1, 0.0), (0, 3, 1.0)) == [1.0, 3.0, 5.0, 2.0]


def test_replay_by_time_uses_the_row_in_progress():
    trace = pl.timing.Trace([row(0, 1, 10.0, 2.0), row(0, 2, 15.0, 1.0), row(1, 1, 12.0, 8.0)], by="time")
    # The trace begins at 10 s and ends at 20 s; before its first row a worker takes that one.
    asked = [(0, 7, 0.0), (0, 7, 4.9), (0, 7, 5.0), (0, 7, 9.9), (1, 7, 0.0)]
    assert replayed(trace, *asked) == [2.0, 2.0, 1.0, 1.0, 8.0]


def test_a_row_begins_at_its_own_start_time():
    assert replayed(pl.timing.Trace(rows_of([1.0, 2.0, 3.0]), by="time"), (0, 1, 1.0), (0, 1, 3.0)) == [2.0, 3.0]


@pytest.mark.parametrize("by", ["draw", "time"])
def test_a_trace_repeats_after_its_end_with_one_warning(by):
    trips = pl.Cluster(1, pl.timing.Trace(rows_of([1.0, 2.0]), by=by)).round_trips(0)
    starts_s = [0.0, 1.0, 3.0, 4.0, 6.0]
    with pytest.warns(PacelineWarning, match="longer than a trace") as caught:
        found = [trips.duration_s(0, draw, start_s) for draw, start_s in enumerate(starts_s, start=1)]
    assert found == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert len(caught) == 1


def test_waiting_for_the_server_counts_as_pushing():
    trace = pl.timing.Trace(
        [TraceRow(worker=0, draw=1, start_s=1.0, pull_s=0.5, compute_s=1.0, push_s=0.25, end_s=4.0, censored=0)]
    )
    assert pl.Cluster(1, trace).round_trips(0).times(0, 1, 0.0) == (0.5, 1.0, 1.5)


def test_speed_slowdowns_and_network_modify_recorded_times():
    trace = pl.timing.Trace(
        [TraceRow(worker=0, draw=1, start_s=0.0, pull_s=1.0, compute_s=6.0, push_s=2.0, end_s=9.0, censored=0)]
    )
    slowdown = pl.timing.Slowdown(at_s=3.5, factor=4, workers=(0,))
    cluster = pl.Cluster(1, trace, speed=3, slowdowns=[slowdown], network=pl.timing.Network(latency_s=0.5))
    # Computing begins after 1.5 s, 2 s of work are left at 1.5 s and none at 3.5 s.
    assert cluster.round_trips(0).times(0, 1, 0.0) == (1.5, 2.0, 2.5)
    assert cluster.round_trips(0).times(0, 1, 1.0) == (1.5, 1.0 + 1.0 * 4, 2.5)


def test_a_trace_can_slow_down_real_workers():
    slowness = pl.Cluster(2, pl.timing.Trace([row(0, 1, total_s=0.3), row(1, 1, total_s=0.001)]))
    with warnings.catch_warnings(action="ignore", category=PacelineWarning):
        run = trained(pl.bsp(), pl.LocalCluster(2, slowness=slowness), updates=1)
    slow, fast = sorted(run.history.of(pl.callbacks.GradientArrived), key=lambda each: each.worker)
    assert slow.compute_s > 0.3 > fast.compute_s


# -- as it is typed
def test_a_trace_can_be_given_as_cluster_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = pl.timing.Trace([*rows_of([1.0, 2.0, 3.0], censored=[2]), *rows_of([5.0], worker=1)])
    trace.to_csv("trace.csv")
    by_time = replace(trace, by="time", censored="km")
    assert parse_cluster("trace:trace.csv") == pl.Cluster(2, trace)
    assert parse_cluster("trace(file=trace.csv, by=time, censored=km)") == pl.Cluster(2, by_time)
    assert parse_cluster("trace:trace.csv", censored="km") == pl.Cluster(2, replace(trace, censored="km"))

    (tmp_path / "cluster.toml").write_text('timing = "trace(file=trace.csv, by=time)"\nspeed = 2\n')
    assert load_cluster("cluster.toml") == pl.Cluster(2, replace(trace, by="time"), speed=2)
    (tmp_path / "local.toml").write_text('[local]\nworkers = 2\n[slowness]\ntiming = "trace:trace.csv"\n')
    assert load_cluster("local.toml") == pl.LocalCluster(2, slowness=pl.Cluster(2, trace))
    assert parse_cluster("local.toml", censored="km").slowness.timing.censored == "km"


def test_the_repr_of_a_cluster_with_a_trace_is_short():
    text = "Trace('yesterday', 1 workers, 3 rows, by='draw', censored=None, digest="
    assert text in str(pl.Cluster(1, CENSORED))


REFUSED = [
    (lambda: pl.Cluster(3, CENSORED), "yesterday has 1 worker, the cluster 3: give 1"),
    (lambda: pl.Cluster(1, [CENSORED]), "expected a pl.timing.Distribution"),
    (lambda: pl.timing.Trace(CENSORED.rows, by="day"), "by='day', expected 'draw' or 'time'"),
    (lambda: pl.timing.Trace(CENSORED.rows, censored="mean"), "censored='mean', expected 'km'"),
    (lambda: parse_cluster("4*exp(mean=1)", censored="km"), 'censored="km" applies to the rows of a trace'),
    (lambda: parse_cluster("local:4", censored="km"), 'censored="km" applies to the rows of a trace'),
    (lambda: pl.timing.Trace([row(), row(draw=2, total_s=-1.0)], source="ours"), "ours, row 2, column compute_s"),
    (lambda: pl.timing.Trace(rows_of([1.0], censored=[0])), "has no finished round trip"),
    (lambda: pl.timing.Trace.of(History(list)), "the run has no finished round trip"),
]


@pytest.mark.parametrize(("build", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_invalid_arguments_are_refused(build, words):
    with pytest.raises(pl.UsageError) as refusal:
        build()
    assert words in str(refusal.value)


HEADER = "worker,draw,start_s,pull_s,compute_s,push_s,end_s,censored\n"
GOOD = "0,1,0,0,1,0,1,0\n"
FILES = [
    ("", "line 1: column worker is missing"),
    (HEADER.replace("push_s,", "") + GOOD, "line 1: column push_s is missing; expected worker,draw,start_s"),
    (HEADER, "has no rows"),
    (HEADER + "0,1,0,0,1,0,1\n", "line 2, column censored: '' is not a whole number"),
    (HEADER + "0,1,0,0,1,0,1,0,0\n", "line 2, column 9: more cells than columns"),
    (HEADER + GOOD + "0,2,0,0,fast,0,1,0\n", "line 3, column compute_s: 'fast' is not a number of seconds"),
    (HEADER + "\n" + GOOD + "0,2,0,,1,0,1,0\n", "line 4, column pull_s: '' is not a number of seconds"),
    (HEADER + "0,1,0,0,-1,0,1,0\n", "line 2, column compute_s: compute_s=-1.0 is not a number in [0, inf)"),
    (HEADER + "0,1,0,0,nan,0,1,0\n", "line 2, column compute_s: compute_s=nan is not a number in [0, inf)"),
    (HEADER + "0,1,0,0,1,0,inf,0\n", "line 2, column end_s: end_s=inf is not a number in [0, inf)"),
    (HEADER + "0,1.5,0,0,1,0,1,0\n", "line 2, column draw: '1.5' is not a whole number"),
    (HEADER + "0,0,0,0,1,0,1,0\n", "line 2, column draw: draw=0 is not a whole number in [1, inf)"),
    (HEADER + "-1,1,0,0,1,0,1,0\n", "line 2, column worker: worker=-1 is not a whole number in [0, inf)"),
    (HEADER + "0,1,0,0,1,0,1,2\n", "line 2, column censored: censored=2 is not a whole number in [0, 1]"),
    (HEADER + "0,1,5,0,1,0,4,0\n", "line 2, column end_s: 4.0 is not after start_s, 5.0"),
    (HEADER + "0,1,5,0,0,0,5,0\n", "line 2, column end_s: 5.0 is not after start_s, 5.0"),
    (HEADER + "0,1,0,1,1,1,2,0\n", "column end_s: 2.0 is before start_s + pull_s + compute_s + push_s = start_s + 3.0"),
    (HEADER + GOOD + GOOD, "line 3, column draw: 1 of worker 0 occurs twice"),
    (HEADER + GOOD + "2,1,0,0,1,0,1,0\n", "line 3, column worker: 2, but there is no worker 1"),
    (HEADER + "0,1,0,0,1,0,1,1\n", "t.csv has no finished round trip"),
]


@pytest.mark.parametrize(("content", "words"), FILES, ids=[words for _, words in FILES])
def test_a_wrong_file_is_refused_with_its_line_and_column(content, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(pl.UsageError) as refusal:
        parse_cluster("trace:t.csv")
    assert words in str(refusal.value)
    assert "t.csv" in str(refusal.value)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff")])
def test_a_file_that_cannot_be_read_is_named(make, tmp_path):
    make(tmp_path / "t.csv")
    with pytest.raises(pl.UsageError, match=r"cannot read the trace .*t\.csv"):
        pl.timing.Trace.from_csv(tmp_path / "t.csv")
