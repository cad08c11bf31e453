"""What is written down is what happened."""

import json
from threading import Lock

import numpy as np
import pytest

import paceline as pl
from event_lines import read_events
from paceline.core.events import OLD_DRAW, Accept, Arrival, Compute, Drop, Interrupt, Timer
from paceline.core.records import (
    DecisionMade,
    GradientArrived,
    UpdateMade,
    VersionEvaluated,
    WorkerLost,
    WorkInterrupted,
    WorkUnfinished,
)
from paceline.errors import PacelineWarning
from paceline.recording.callback import Memory
from paceline.recording.event_log import read_records
from paceline.recording.recorder import Recorder
from paceline.recording.run_folder import EVENTS, MODEL, RUN, SavedRun
from tiny_jobs import dataset, tiny_job

CLUSTER = pl.Cluster(4, timing=pl.timing.Exponential(1.0))


def run(protocol="k_sync(k=2)", stop="updates=40", cluster=CLUSTER, **options):
    job = tiny_job(**options.pop("job", {}))
    return pl.train(job, protocol=protocol, cluster=cluster, stop=stop, seed=5, **options)


def test_columns_by_update():
    columns = run().history.columns()
    assert list(columns["version"]) == list(range(1, 41))
    assert set(columns["k"]) == {2}
    assert list(columns["workload"]) == list(range(2, 82, 2))
    assert list(columns["samples_applied"]) == list(range(16, 656, 16))
    assert (np.diff(columns["time_s"]) > 0).all()
    assert np.isfinite(columns["loss"]).all()


def test_columns_by_second_show_the_state_at_each_second():
    history = run().history
    by_update, by_second = history.columns(), history.columns(by="second", step_s=0.5)
    for time_s, version in zip(by_second["time_s"], by_second["version"], strict=True):
        assert version == (by_update["time_s"] <= time_s).sum()


def test_columns_of_a_run_without_updates_are_empty():
    assert run(stop="seconds=0.0001").history.columns(by="second")["version"].size == 0


def test_pandas():
    frame = run().history.to_pandas()
    assert frame.shape[0] == 40
    assert frame["used"].iloc[-1] == 80


def test_totals_agree_with_the_records():
    result = run()
    totals, history = result.history.totals, result.history
    arrivals = history.of(GradientArrived)
    assert totals.used == sum(arrival.used for arrival in arrivals) == 80
    assert totals.dropped == sum(not arrival.used for arrival in arrivals)
    assert totals.interrupted == len(history.of(WorkInterrupted))
    assert totals.samples_dropped == 8 * (totals.dropped + totals.interrupted)
    assert totals.mean_k == 2


def test_a_gradient_held_at_the_end_is_not_in_the_mean_quorum():
    cluster = pl.Cluster(3, [pl.timing.Deterministic(1.0), *[pl.timing.Deterministic(2.0)] * 2])
    totals = [run("bsp", stop, cluster).history.totals for stop in ("seconds=2.2", "seconds=3.2")]
    assert [(each.updates, each.used, each.applied, each.mean_k) for each in totals] == [(1, 3, 3, 3), (1, 4, 3, 3)]


@pytest.mark.slow
def test_the_idle_share_matches_hand_calculation():
    # Two workers of 1 s and 3 s under BSP: the first is idle 2 s of every 3.
    cluster = pl.Cluster(2, timing=[pl.timing.Deterministic(1.0), pl.timing.Deterministic(3.0)])
    assert run("bsp", cluster=cluster).history.totals.idle_share == pytest.approx(2 / 6)
    assert run("bsp", cluster=cluster).history.columns()["idle_share"][-1] == pytest.approx(2 / 6)
    assert run("asp", cluster=cluster).history.totals.idle_share == pytest.approx(0.0)


def test_the_log_holds_every_record_in_order(tmp_path):
    result = run(out=tmp_path / "run")
    events = read_events(tmp_path / "run" / EVENTS)
    assert len(events) == len(result.history.records)
    updates = [event for event in events if event["event"] == "update_made"]
    assert [event["loss"] for event in updates] == [record.loss for record in result.history.of(UpdateMade)]
    assert events[-1] == {
        "event": "run_ended",
        "now_s": result.time_s,
        "outcome": "updates",
        "reason": "40 updates made",
        "busy_s": pytest.approx((1 - result.history.totals.idle_share) * 4 * result.time_s),
        "live_s": pytest.approx(4 * result.time_s),
    }


def test_a_truncated_log_is_read_with_a_warning(tmp_path):
    run(out=tmp_path / "run")
    log = tmp_path / "run" / EVENTS
    whole = list(read_records(log))
    log.write_text(log.read_text()[:-20])
    with pytest.warns(PacelineWarning, match=f"line {len(whole)} is cut short"):
        assert list(read_records(log)) == whole[:-1]


def test_a_broken_line_is_named(tmp_path):
    run(out=tmp_path / "run")
    log = tmp_path / "run" / EVENTS
    log.write_text(log.read_text().replace('"event":"update_made"', '"event":"update_mode"', 1))
    with pytest.raises(pl.RunError, match=r"events.jsonl, line \d+ is no record of a run"):
        list(read_records(log))


def test_a_log_restores_identical_records(tmp_path):
    kept = Memory()
    poisoned = pl.Cluster(3, faults=[pl.Fault(worker=1, draw=2, kind="not_finite"), pl.Fault(worker=2, draw=3)])
    job = {"eval_data": dataset(), "on_drop": "discard", "sampling": "epoch"}
    run("k_async(k=2)", "updates=12", poisoned, job=job, callbacks=[kept], out=tmp_path / "run")
    assert {WorkerLost, VersionEvaluated, WorkUnfinished} <= {type(record) for record in kept.records}
    assert repr(list(read_records(tmp_path / "run" / EVENTS))) == repr(kept.records)  # nan is not equal to itself


def test_totals_are_computed_from_the_log(tmp_path):
    result = run(out=tmp_path / "run")
    assert SavedRun(tmp_path / "run").history.totals == run().history.totals == result.history.totals


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(pl.UsageError, match=r"not the folder of a run"):
        SavedRun(tmp_path)


def test_tasks_in_flight_at_the_end_are_recorded():
    history = run("asp", "updates=5").history
    unfinished = history.of(WorkUnfinished)
    assert {record.worker for record in unfinished} == {0, 1, 2, 3} - {history.of(GradientArrived)[-1].worker}
    assert all(record.started_s <= record.now_s == history.records[-1].now_s for record in unfinished)


def test_the_folder_has_the_configuration_and_the_model(tmp_path):
    from safetensors.torch import load_file

    result = run(protocol="bsp@25% >> asp", stop="epochs=2", out=tmp_path / "run")
    configuration = json.loads((tmp_path / "run" / RUN).read_text())
    assert configuration["protocol"] == "bsp until 6 gradients >> asp"
    assert configuration["seed"] == 5
    assert set(configuration["versions"]) == {"paceline", "python", "torch", "numpy"}
    saved = load_file(tmp_path / "run" / MODEL)
    assert all((saved[name] == tensor).all() for name, tensor in result.model.state_dict().items())


def test_callbacks_receive_every_record():
    heard = []

    class Listener(pl.callbacks.Callback):
        def on_update(self, update):
            heard.append(f"update {update.version}")

        def on_arrival(self, arrival):
            heard.append("arrival")

        def on_evaluate(self, evaluation):
            heard.append(f"evaluation {evaluation.version}")

        def on_switch(self, decision):
            heard.append(decision.reason)

        def on_end(self, end):
            heard.append(end.reason)

    run("bsp@updates=1 >> asp", "updates=2", callbacks=[Listener()], job={"eval_data": dataset()})
    begin, switch = "bsp: the run begins", "asp: 1 updates reached"
    updates = ["arrival"] * 4 + ["update 1", switch, "arrival", "update 2"]
    assert heard == [begin, *updates, "evaluation 2", "2 updates made"]


def test_an_error_in_a_callback_reaches_the_caller():
    class Broken(pl.callbacks.Callback):
        def on_update(self, update):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(callbacks=[Broken()])


@pytest.mark.slow
def test_a_target_accuracy_has_the_time_of_the_version_that_reached_it():
    result = run(
        stop="accuracy=0.5,updates=500", job={"eval_data": dataset()}, evaluate_every=pl.plans.Duration("updates", 10)
    )
    evaluations = result.history.of(VersionEvaluated)
    reaching = next(record for record in evaluations if record.metrics["accuracy"] >= 0.5)
    published = [record.now_s for record in result.history.of(UpdateMade) if record.version == reaching.version]
    assert result.stopped_by == "accuracy"
    assert published == [result.time_s]


def test_a_target_accuracy_that_cannot_be_measured_is_refused():
    with pytest.raises(pl.UsageError, match=r"return it from step as \(loss, \{'accuracy': ...\}\)"):
        run(stop="accuracy=0.5", job={"eval_data": dataset(), "step": loss_only, "loss": None})


def loss_only(model, batch):
    return model(batch[0]).square().mean()


def test_decisions_carry_their_reason():
    grow = pl.bsp().controlled_by(pl.controllers.ScheduledQuorum({0: 1, 2: 3}))
    decisions = run(grow, stop="updates=3").history.of(DecisionMade)
    assert [decision.reason for decision in decisions if decision.kind == "quorum"] == [
        "k=1: scheduled k=1 from version 0",
        "k=1: scheduled k=1 from version 1",
        "k=3: scheduled k=3 from version 2",
    ]


def test_the_last_row_agrees_with_the_totals():
    result = run()
    last = {name: column[-1] for name, column in result.history.columns().items()}
    totals = result.history.totals
    assert totals.interrupted > 0
    assert last["used"] == totals.used
    assert last["interrupted"] <= totals.interrupted  # an update may interrupt after its row
    later = totals.interrupted - last["interrupted"]
    assert last["samples_dropped"] == totals.samples_dropped - 8 * later


def test_a_run_that_fails_before_its_start_leaves_no_folder(tmp_path):
    lock = Lock()  # cannot be sent to a worker process
    with pytest.raises(pl.UsageError, match="lock"):
        run(cluster=pl.LocalCluster(2), job={"loss": lambda output, _: lock and output.sum()}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_keeps_its_model_and_its_events(tmp_path):
    class Broken(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == 5:
                raise KeyError("mine")

    with pytest.raises(KeyError):
        run(callbacks=[Broken()], out=tmp_path / "run")
    assert (tmp_path / "run" / MODEL).exists()
    assert sum(event["event"] == "update_made" for event in read_events(tmp_path / "run" / EVENTS)) == 5


def test_a_gradient_that_crosses_its_interrupt_is_recorded_with_its_own_version_and_start():
    kept = Memory()
    recorder = Recorder(1, 8, "", lambda: 0.1, [kept])
    recorder.observe(0.0, None, [Compute(0, 0, 1)])
    recorder.observe(1.0, Timer(1.0), [Interrupt(0, 1), Compute(0, 4, 2)])
    recorder.observe(2.0, Timer(2.0), [Interrupt(0, 2), Compute(0, 7, 3)])
    for draw in (1, 2):
        recorder.observe(3.0, Arrival(3.0, 0, draw), [Drop(worker=0, draw=draw, staleness=None, reason=OLD_DRAW)])
    recorder.observe(4.0, Arrival(4.0, 0, 3), [Accept(worker=0, draw=3, staleness=0, samples=8)])
    arrivals = [record for record in kept.records if isinstance(record, GradientArrived)]
    assert [(each.draw, each.version, each.started_s) for each in arrivals] == [(1, 0, 0.0), (2, 4, 1.0), (3, 7, 2.0)]
    assert (recorder.totals.interrupted, recorder.totals.dropped, recorder.totals.used) == (2, 0, 1)
