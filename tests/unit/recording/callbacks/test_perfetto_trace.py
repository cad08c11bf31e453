"""A timeline holds what the history holds, as Chrome's trace format has it."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

import paceline as pl
from paceline.core.records import RunEnded, UpdateMade, WorkInterrupted, WorkUnfinished
from paceline.recording.callbacks.perfetto_trace import HELD
from selections import parametrize_few
from tiny_jobs import tiny_job

CLUSTER = pl.Cluster(4, timing=pl.timing.Exponential(1.0), network=pl.timing.Network(latency_s=0.1))


def run(tmp_path, protocol="k_sync(k=2)", stop="updates=30", cluster=CLUSTER):
    path = tmp_path / "timeline.json"
    result = pl.train(
        tiny_job(), protocol=protocol, cluster=cluster, stop=stop, seed=3, callbacks=[pl.callbacks.PerfettoTrace(path)]
    )
    return result.history, json.loads(path.read_text())


def work_of(trace):
    return [event for event in trace if event["ph"] == "X" and event["cat"] == "work"]


def truth_of(records):
    """Return (name, start, end) of each (worker, draw), as in the final records."""
    truth = {}
    for record in records:
        match record:
            case WorkInterrupted() | WorkUnfinished():
                name = "interrupted" if isinstance(record, WorkInterrupted) else "unfinished"
            case pl.callbacks.GradientArrived():
                name = "interrupted" if record.crossed_interrupt else "used" if record.used else "dropped"
            case _:
                continue
        truth[record.worker, record.draw] = (name, record.started_s, record.now_s)
    return truth


@parametrize_few("protocol", ["k_sync(k=2)", "asp", "bsp", "backup(k=2)", "ringmaster(r=2, stops=true)"], keep=1)
def test_every_task_is_in_the_trace_once_with_its_times(tmp_path, protocol):
    history, trace = run(tmp_path, protocol)
    shown = {
        (event["tid"] - 1, event["args"]["draw"]): (
            event["name"],
            event["ts"] / 1e6,
            (event["ts"] + event["dur"]) / 1e6,
        )
        for event in work_of(trace)
    }
    truth = truth_of(history)
    assert len(work_of(trace)) == len(shown) == len(truth)
    assert {key: value[0] for key, value in shown.items()} == {key: value[0] for key, value in truth.items()}
    assert all(shown[key][1:] == pytest.approx(truth[key][1:]) for key in truth)


def test_arrivals_have_their_details(tmp_path):
    history, trace = run(tmp_path, "backup(k=2)")
    shown = [event["args"] for event in work_of(trace) if event["name"] in ("used", "dropped")]
    assert [tuple(args.values()) for args in shown] == [
        (each.draw, each.version, each.staleness, each.reason, None if each.loss != each.loss else each.loss)
        for each in history.of(pl.callbacks.GradientArrived)
    ]


def test_updates_are_instants_and_counters(tmp_path):
    history, trace = run(tmp_path)
    updates = history.of(UpdateMade)
    instants = [event for event in trace if event["ph"] == "i" and event["name"] == "update"]
    expected = [(each.now_s * 1e6, each.version, each.k, each.reason) for each in updates]
    assert [(event["ts"], *event["args"].values()) for event in instants] == expected
    for name, values in (("k", [each.k for each in updates]), ("loss", [each.loss for each in updates])):
        assert [event["args"][name] for event in trace if event["ph"] == "C" and event["name"] == name] == values


def test_a_round_trip_is_split_into_its_parts(tmp_path):
    history, trace = run(tmp_path, "asp")
    parts = {part: [event["dur"] for event in trace if event["name"] == part] for part in ("pull", "compute", "push")}
    arrivals = history.of(pl.callbacks.GradientArrived)
    assert arrivals[0].pull_s > 0
    for part, durations in parts.items():
        assert durations == pytest.approx([getattr(each, f"{part}_s") * 1e6 for each in arrivals])


def test_every_track_has_its_name(tmp_path):
    _, trace = run(tmp_path)
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert names == {0: "server", 1: "worker 0", 2: "worker 1", 3: "worker 2", 4: "worker 3"}


def arrival(draw, started_s, now_s, crossed=False):
    return pl.callbacks.GradientArrived(
        now_s=now_s,
        worker=0,
        draw=draw,
        version=0,
        started_s=started_s,
        staleness=0,
        used=not crossed,
        reason="",
        loss=1.0,
        samples=8,
        squared_norm=1.0,
        pull_s=0.0,
        compute_s=0.0,
        push_s=0.0,
        crossed_interrupt=crossed,
    )


def write(path, *records):
    timeline = pl.callbacks.PerfettoTrace(path)
    for record in records:
        timeline.on_record(record)
    return timeline


END = RunEnded(now_s=9.0, outcome=pl.results.Outcome.UPDATES, reason="", busy_s=1.0, live_s=1.0)


def test_a_gradient_that_crossed_its_interrupt_replaces_the_interrupted_work(tmp_path):
    interrupted = WorkInterrupted(now_s=2.0, worker=0, draw=1, version=0, started_s=0.0, samples=8)
    write(tmp_path / "trace", interrupted, arrival(1, 0.0, 3.0, crossed=True), arrival(2, 2.0, 5.0), END)
    shown = [
        (event["name"], event["ts"], event["dur"]) for event in work_of(json.loads((tmp_path / "trace").read_text()))
    ]
    assert shown == [
        ("interrupted", 0.0, 3e6),
        ("used", 3e6, 2e6),
    ]  # the second began when the first was out of the way


def test_a_late_return_replaces_the_unfinished_work(tmp_path):
    write(
        tmp_path / "trace",
        WorkUnfinished(now_s=2.0, worker=0, draw=1, version=0, started_s=0.0),
        arrival(1, 0.0, 7.0),
        END,
    )
    assert [event["name"] for event in work_of(json.loads((tmp_path / "trace").read_text()))] == ["used"]


def test_tasks_on_a_track_never_overlap_and_memory_is_bounded(tmp_path):
    many = [
        WorkInterrupted(now_s=draw + 1.0, worker=0, draw=draw, version=0, started_s=float(draw), samples=8)
        for draw in range(3 * HELD)
    ]
    write(tmp_path / "trace", *many, END)
    tracks = defaultdict(list)
    for event in work_of(json.loads((tmp_path / "trace").read_text())):
        tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks[1]) == 3 * HELD
    assert all(end <= start for track in tracks.values() for (_, end), (start, _) in pairwise(track))


def test_a_killed_run_leaves_complete_events_without_the_closing_bracket(tmp_path):
    records = run(tmp_path)[0].records
    write(tmp_path / "cut", *records[:60])
    text = (tmp_path / "cut").read_text()
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    assert len(work_of(json.loads(text + "]"))) > 10


def test_a_resumed_run_has_one_complete_timeline(tmp_path):
    history, whole = run(tmp_path)
    records = history.records
    write(tmp_path / "resumed", *records[:70])
    resumed = pl.callbacks.PerfettoTrace(tmp_path / "resumed")
    resumed.on_resume(
        [
            *records[:50],
            RunEnded(
                now_s=records[49].now_s, outcome=pl.results.Outcome.INTERRUPTED, reason="", busy_s=1.0, live_s=1.0
            ),
        ]
    )
    for record in records[50:]:
        resumed.on_record(record)
    assert json.loads((tmp_path / "resumed").read_text()) == whole


@pytest.mark.slow
def test_a_resumed_run_has_the_timeline_of_the_uninterrupted_run(tmp_path):
    asked = {"protocol": "k_sync(k=2)", "cluster": CLUSTER, "seed": 3}
    for stop in ("updates=11", "updates=30"):
        where = {"resume" if stop == "updates=30" else "out": tmp_path / "run"}
        pl.train(
            tiny_job(), stop=stop, callbacks=[pl.callbacks.PerfettoTrace(tmp_path / "resumed.json")], **asked, **where
        )
    run(tmp_path)
    assert (tmp_path / "resumed.json").read_bytes() == (tmp_path / "timeline.json").read_bytes()


def test_a_file_that_cannot_be_written_stops_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(pl.RunError, match=r"cannot write .*timeline.json: .*; the run stopped"):
        run(tmp_path / "file")
