"""Replay: the recorded arrivals of a run lead to the recorded decisions."""

import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

import paceline as pl
from paceline.core.records import DecisionMade
from paceline.recording.run_folder import EVENTS, RUN, SavedRun
from selections import each_value_once, parametrize_few
from tiny_controllers import RandomWalk
from tiny_jobs import dataset, tiny_job

SLOWNESS = pl.Cluster(4, timing=[*[pl.timing.Exponential(0.001)] * 3, pl.timing.Exponential(0.01)])
WALK = pl.k_async(k=2).controlled_by(RandomWalk(3, 4))
DYING = [
    pl.Fault(worker=1, draw=3, back_after_s=2.0),
    pl.Fault(worker=2, draw=5),
    pl.Fault(worker=3, draw=4, kind="not_finite"),
    pl.Fault(worker=0, draw=6, kind="hang"),
]


def simulated(protocol="k_batch_async(k=3)", stop="updates=30", faults=(), **options):
    cluster = pl.Cluster(4, timing=pl.timing.Exponential(1.0), faults=faults)
    job = tiny_job(eval_data=dataset(), sampling="epoch", lr_rule="proportional")
    return pl.train(job, protocol=protocol, cluster=cluster, stop=stop, evaluate_every="updates=9", **options)


def real(protocol="k_sync(k=3)", stop="updates=40", **options):
    cluster = pl.LocalCluster(4, slowness=SLOWNESS)
    return pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop=stop, **options)


@parametrize_few(
    ("protocol", "stop"),
    each_value_once(
        ["bsp", "k_batch_sync(k=3)", "ssp(lead=1)", "bsp@updates=5 >> asp@seconds=7 >> bsp", "dbw"],
        ["updates=30", "seconds=7.5", "epochs=3", "accuracy=0.4,updates=30"],
    ),
    keep=1,
)
def test_simulated(protocol, stop, tmp_path):
    run = simulated(protocol, stop, out=tmp_path / "run")
    found = pl.replay(tmp_path / "run")
    assert (found.difference, found.updates) == ("", run.history.totals.updates)
    assert found.decisions > found.updates


@pytest.mark.slow
def test_schedule_whose_warm_up_ends_at_a_plateau(tmp_path):
    job = tiny_job(schedule=pl.plans.LinearSchedule(check_every="gradients=8"))
    run = pl.train(job, protocol="asp", cluster="4*exp(mean=1)", stop="gradients=90", out=tmp_path / "run")
    assert "plateau" in str([each.reason for each in run.history.of(DecisionMade) if each.kind == "warm_up"])
    assert pl.replay(tmp_path / "run").difference == ""


def test_worker_failures_and_a_timeout(tmp_path):
    simulated("k_async(k=2)", faults=DYING, worker_timeout_s=4.0, out=tmp_path / "run")
    assert pl.replay(tmp_path / "run").is_same


@parametrize_few(
    "protocol",
    [
        "b_dbw(release_idle=true)",
        "adasync(base=k_batch_async, K_0=2)@updates=9 >> dbw",
        "bsp + elastic(window=1, consecutive=1)@updates=9 >> bsp + greedy(window=1, consecutive=1, persistent_s=2)",
    ],
    keep=1,
)
def test_named_controllers(protocol, tmp_path):
    simulated(protocol, faults=DYING, worker_timeout_s=4.0, out=tmp_path / "run")
    assert pl.replay(tmp_path / "run").difference == ""


ALOOF = "bsp + elastic(window=1, consecutive=1)@updates=20 >> asp"


@parametrize_few(
    "protocol",
    [
        "auto",
        "bsp",
        "k_sync(k=3)",
        "k_batch_async(k=3)@updates=15 >> asp",
        "dbw",
        "patient",
        pytest.param(ALOOF, marks=pytest.mark.slow),
    ],
    keep=1,
)
def test_real(protocol, tmp_path):
    real(protocol, stop="updates=25", out=tmp_path / "run")
    assert pl.replay(tmp_path / "run").difference == ""


@pytest.mark.slow
def test_a_real_run_of_500_updates(tmp_path):
    real("k_batch_async(k=3)@updates=200 >> k_sync(k=3)", "updates=500", out=tmp_path / "run")
    found = pl.replay(tmp_path / "run")
    assert (found.difference, found.updates) == ("", 500)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)]
)
def test_automatic_protocol_and_rate(optimizer, tmp_path):
    job = tiny_job(optimizer=optimizer, clip_norm=1.0)
    cluster = pl.Cluster(4, timing=pl.timing.Exponential(1.0), faults=[pl.Fault(worker=1, draw=8, back_after_s=2.0)])
    pl.train(job, protocol="auto@gradients=80 >> asp", cluster=cluster, stop="gradients=110", out=tmp_path / "run")
    kinds = {each.kind for each in SavedRun(tmp_path / "run").history.of(DecisionMade)}
    assert {"protocol", "learning_rate"} <= kinds
    assert pl.replay(tmp_path / "run").difference == ""


def test_resumed_run(tmp_path):
    real(stop="updates=11", out=tmp_path / "run")
    real(stop="seconds=0.2,updates=30", resume=tmp_path / "run")
    real(resume=tmp_path / "run")
    found = pl.replay(tmp_path / "run")
    assert (found.difference, found.updates) == ("", 40)


@parametrize_few("seed", range(2), keep=1)
def test_server_with_a_service_time(seed, tmp_path):
    busy = pl.Cluster(4, timing=pl.timing.Exponential(1.0), server=pl.timing.ServerTime(update_s=0.3, gradient_s=0.05))
    plan = "k_async(k=2)@seconds=6 >> asp"
    pl.train(tiny_job(), protocol=plan, cluster=busy, stop="updates=40", seed=seed, out=tmp_path / "run")
    assert pl.replay(tmp_path / "run").difference == ""


@pytest.mark.slow
def test_interrupted_run(tmp_path):
    class Interrupt(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == 7:
                signal.raise_signal(signal.SIGINT)

    run = simulated(out=tmp_path / "run", callbacks=[Interrupt()])
    assert run.stopped_by == "interrupted"
    assert pl.replay(tmp_path / "run").difference == ""
    simulated(resume=tmp_path / "run")
    assert pl.replay(tmp_path / "run").difference == ""


@pytest.mark.slow
def test_run_extended_by_epochs(tmp_path):
    simulated("k_sync(k=3)", "epochs=1", out=tmp_path / "run")
    simulated("k_sync(k=3)", "epochs=3", resume=tmp_path / "run")
    assert pl.replay(tmp_path / "run").difference == ""


OTHER_STOPS = [
    ["updates=30", "updates=11"],
    ["updates=30", "seconds=2"],
    ["updates=30", "loss=5"],
    ["seconds=9", "updates=4"],
    ["accuracy=0.4,updates=30", "gradients=7", "updates=40"],
    ["updates=10", "updates=20", "updates=5", "updates=4", "updates=25", "seconds=1"],
    ["updates=10", "updates=10", "updates=10,seconds=1"],
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "stops"),
    each_value_once(["k_sync(k=3)", "bsp@updates=3 >> asp", "dbw"], OTHER_STOPS),
    ids=lambda each: each if isinstance(each, str) else " then ".join(each),
)
def test_run_resumed_with_other_stops(protocol, stops, tmp_path):
    run = simulated(protocol, stops[0], out=tmp_path / "run")
    for stop in stops[1:]:
        run = simulated(protocol, stop, resume=tmp_path / "run")
    found = pl.replay(tmp_path / "run")
    assert (found.difference, found.updates) == ("", run.history.totals.updates)


@pytest.mark.slow
def test_run_of_epochs_resumed_with_other_stops(tmp_path):
    simulated("k_sync(k=3)", "epochs=2", out=tmp_path / "run")
    for stop in ("epochs=1", "updates=3", "updates=2", "epochs=3", "seconds=3", "epochs=4"):
        run = simulated("k_sync(k=3)", stop, resume=tmp_path / "run")
        assert pl.replay(tmp_path / "run").difference == "", stop
    assert pl.replay(tmp_path / "run").updates == run.history.totals.updates


@pytest.mark.slow
def test_interrupted_run_resumed_with_a_lower_stop(tmp_path):
    class Interrupt(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == 7:
                signal.raise_signal(signal.SIGINT)

    simulated(out=tmp_path / "run", callbacks=[Interrupt()], checkpoint_every="updates=1")
    run = simulated(stop="updates=3", resume=tmp_path / "run")
    assert run.reason == "8 updates made"
    assert pl.replay(tmp_path / "run").difference == ""


@pytest.mark.slow
def test_real_run_resumed_with_lower_stops(tmp_path):
    real(stop="updates=20", out=tmp_path / "run")
    for stop in ("updates=10", "updates=25", "updates=5"):
        run = real(stop=stop, resume=tmp_path / "run")
    found = pl.replay(tmp_path / "run")
    assert (found.difference, found.updates) == ("", run.history.totals.updates)


def test_a_run_that_continued_past_its_stop_is_detected(tmp_path):
    simulated(stop="updates=10", out=tmp_path / "run")
    simulated(stop="updates=20", resume=tmp_path / "run")
    text = (tmp_path / "run" / RUN).read_text()
    (tmp_path / "run" / RUN).write_text(text.replace("Stop(updates=10)", "Stop(updates=9)"))
    assert "the log has" in pl.replay(tmp_path / "run").difference


def test_with_a_controller(tmp_path):
    simulated(WALK, out=tmp_path / "run")
    assert pl.replay(tmp_path / "run", protocol=WALK).difference == ""
    with pytest.raises(pl.UsageError, match=r"part that cannot be made from run.json \(RandomWalk\)"):
        pl.replay(tmp_path / "run")
    with pytest.raises(pl.UsageError, match="expected the same plan"):
        pl.replay(tmp_path / "run", protocol=pl.bsp())


def test_a_changed_run_is_refused(tmp_path):
    simulated(stop="updates=5", out=tmp_path / "run")
    simulated("asp", resume=tmp_path / "run", allow_change=True)
    with pytest.raises(
        pl.UsageError, match=r"resumed with changes at update 5 \(protocol k_batch_async\(k=3\), now asp"
    ):
        pl.replay(tmp_path / "run")


EDITS = {
    "another loss": ('"loss":', '"loss":1', "the log has UpdateMade"),
    "an update of another size": ('"k":3', '"k":2', "the log has UpdateMade"),
    "an update too early": ('"event":"update_made"', None, "the replay has UpdateMade"),
    "a gradient dropped": ('"used":true,"reason":""', '"used":false,"reason":"too stale"', "used=False"),
    "a gradient left out": ('"event":"gradient_arrived"', None, "the log has"),
    "another end": ('"reason":"30 updates made"', '"reason":"31 updates made"', "ends because 31"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "run"
    simulated(out=folder)
    return folder


@pytest.mark.parametrize("edit", EDITS)
def test_a_changed_log_is_detected(edit, recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "run")
    old, new, difference = EDITS[edit]
    log = Path(tmp_path / "run" / EVENTS)
    lines = log.read_text().splitlines(keepends=True)
    found = [i for i, line in enumerate(lines) if old in line]
    at = found[-1 if edit == "an update too early" else 0]  # a version left out between others is not even read
    lines[at : at + 1] = [lines[at].replace(old, new)] if new else []
    log.write_text("".join(lines))
    assert difference in pl.replay(tmp_path / "run").difference
