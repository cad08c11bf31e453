"""A resumed simulated run is bit-identical to the run that was never stopped."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import paceline as pl
from paceline.errors import UsageError
from paceline.recording.run_folder import EVENTS
from selections import parametrize_few
from tiny_controllers import RandomWalk
from tiny_jobs import batch_norm_net, dataset, parameters_of, tiny_job

UPDATES = 30


class Numbers(IterableDataset):
    """Iterable dataset that is shuffled in every pass."""

    def __iter__(self):
        inputs, target = dataset(50).tensors
        return iter([(inputs[i], target[i]) for i in torch.randperm(50)])


ADAM = partial(torch.optim.Adam, lr=0.01)
WALK = pl.k_async(k=1).controlled_by(RandomWalk(3, 4))
STRAGGLING = pl.Cluster(
    4,
    timing=pl.timing.Exponential(1.0),
    transient=pl.timing.Transient(mean_on_s=3, mean_off_s=5, slowdown=4),
    slowdowns=[pl.timing.Slowdown(at_s=5, factor=3, workers=(1,))],
    network=pl.timing.Network(latency_s=0.1),
    server=pl.timing.ServerTime(update_s=0.05),
)
DYING = pl.Cluster(
    4,
    faults=[
        pl.Fault(worker=1, draw=3, back_after_s=2.0),
        pl.Fault(worker=2, draw=5),
        pl.Fault(worker=3, draw=4, kind="not_finite"),
    ],
)
EPOCHS = {"sampling": "epoch", "batch_size": 4}
SCHEDULED = {"optimizer": ADAM, "scheduler": partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[20, 50])}
RAMPED = EPOCHS | {"optimizer": partial(torch.optim.SGD, lr=0.01, momentum=0.9)}
BY_WORKLOAD = {
    "schedule": pl.plans.LinearSchedule(check_every="gradients=7", total="gradients=80"),
    "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "no_decay_on": pl.jobs.BATCH_NORMS,
    "model": batch_norm_net,
}
SLOWED = {  # worker 3 is a straggler twice
    "cluster": pl.Cluster(
        4,
        timing=pl.timing.Uniform(0.9, 1.1),
        slowdowns=[pl.timing.Slowdown(at_s=at_s, until_s=at_s + 9, factor=4, workers=(3,)) for at_s in (4, 20)],
    ),
    "stop": "gradients=90",
}
SETTINGS = {
    "bsp": ("bsp", {}, {}),
    "backup": ("backup(k=3)", {}, {}),
    "k_sync": ("k_sync(k=2)", EPOCHS, {}),
    "pull": ("pull(k=3)", {"eval_data": dataset()}, {"evaluate_every": "updates=7"}),
    "k_batch_sync": ("k_batch_sync(k=3)", EPOCHS | {"model": batch_norm_net}, {}),
    "k_async": ("k_async(k=2)", {"clip_norm": 0.5, "lr_rule": "proportional"}, {}),
    "k_batch_async": ("k_batch_async(k=3)", EPOCHS | {"model": batch_norm_net, "sharding": "partitioned"}, {}),
    "asp": ("asp", SCHEDULED, {}),
    "ssp": ("ssp(lead=2)", {"microbatches": 2}, {}),
    "dssp": ("dssp(lead=0, most=3)", {}, SLOWED | {"stop": "gradients=60"}),
    "balanced": ("balanced(m=4, leases=1)", EPOCHS, SLOWED),
    "balanced, queue": ("balanced(m=4)", EPOCHS, SLOWED),
    "balanced, replacement": ("balanced(m=4, leases=1)", {}, SLOWED),
    "ringmaster": ("ringmaster(r=3, stops=true)", EPOCHS, {}),
    "plan": ("bsp@updates=9 >> k_batch_async(k=2)@seconds=5 >> asp", SCHEDULED, {}),
    "random walk": (WALK, EPOCHS | {"model": batch_norm_net, "optimizer": ADAM}, {}),
    "faults": ("k_async(k=2)", EPOCHS, {"cluster": DYING, "worker_timeout_s": 30.0}),
    "iterable data": ("k_async(k=2)", {"data": Numbers()}, {}),
    "evaluated": ("asp", {"eval_data": dataset()}, {}),
    "dbw": ("dbw(window=8)", {"microbatches": 2} | SCHEDULED, {}),
    "dbw with faults": (
        "dbw(forgetting=0.9)@updates=12 >> b_dbw",
        EPOCHS,
        {"cluster": DYING, "worker_timeout_s": 30.0},
    ),
    "compensated": (
        "k_async(k=2)@updates=9 >> asp + staleness_lr(C=0.01) + dc_asgd(lambda0=2, m=0.95)",
        EPOCHS,
        {"measure_steps": True},
    ),
    "greedy": ("bsp + greedy(window=1)@gradients=54 >> asp + momentum(rule='i/n')", RAMPED, SLOWED),
    "schedule": ("k_async(k=2)", EPOCHS | BY_WORKLOAD, {}),
    "elastic": ("bsp + elastic(window=1, persistent_s=5)@gradients=54 >> asp", EPOCHS, SLOWED),
    "adasync": ("adasync(base=k_batch_async, K_0=2)", EPOCHS, {}),
    "noise": ("asp", EPOCHS | {"lr_rule": "noise", "microbatches": 2, "optimizer": ADAM}, {"stop": "updates=60"}),
    "patient": ("patient", EPOCHS, {}),
    "local steps": ("k_batch_async(k=2) + local_steps(H=3)", EPOCHS | SCHEDULED, {}),
    "local seconds": (
        "k_sync(k=2) + local_steps(seconds=3, outer=nesterov)",
        EPOCHS | {"optimizer": ADAM},
        {"cluster": DYING},
    ),
    "patient pull": ("patient(base=pull)", EPOCHS, {}),
    "auto": ("auto", {"lr_of": 2}, {"stop": "gradients=300", "checkpoint_every": "updates=7"}),
}


class Crash(pl.callbacks.Callback):
    """Callback that ends a run at a given record, without any clean-up by the engine."""

    class Crashed(BaseException):
        pass

    def __init__(self, at_record):
        self.left = at_record

    def on_record(self, record):
        self.left -= 1
        if self.left == 0:
            raise self.Crashed


def train(setting, out=None, **options):
    protocol, job, more = SETTINGS[setting]
    usual = {"cluster": STRAGGLING, "seed": 4, "checkpoint_every": "updates=8", "stop": f"updates={UPDATES}"}
    return pl.train(tiny_job(**job), protocol=protocol, out=out, **{**usual, **more, **options})


def assert_same(ours, theirs):
    assert (ours.folder / EVENTS).read_bytes() == (theirs.folder / EVENTS).read_bytes()
    assert torch.equal(parameters_of(ours.model), parameters_of(theirs.model))
    for mine, other in zip(ours.model.buffers(), theirs.model.buffers(), strict=True):
        assert torch.equal(mine, other)
    assert ours.history.totals == theirs.history.totals
    assert (ours.time_s, ours.stopped_by, ours.reason, ours.metrics) == (
        theirs.time_s,
        theirs.stopped_by,
        theirs.reason,
        theirs.metrics,
    )


# Settings whose every part is in another one, or whose state other tests save and load: that of a controller.
SIMPLER = {"bsp", "backup", "k_sync", "k_batch_sync", "asp", "evaluated", "dbw"}
SIMPLER |= {"pull", "k_async", "k_batch_async", "iterable data", "ssp", "schedule"}
SIMPLER |= {"plan", "faults", "ringmaster", "patient pull", "local steps", "balanced, replacement", "noise"}
SIMPLER |= {"auto", "elastic", "greedy", "patient", "adasync", "dssp"}


@pytest.fixture(
    scope="session",
    params=[pytest.param(each, marks=pytest.mark.slow if each in SIMPLER else ()) for each in SETTINGS],
)
def unbroken(request, tmp_path_factory):
    """Return a setting and its uninterrupted run."""
    return request.param, train(request.param, tmp_path_factory.mktemp("unbroken") / "run")


@parametrize_few("share", [0.85], keep=1)
def test_a_resume_after_a_crash_is_bit_identical(unbroken, share, tmp_path):
    setting, whole = unbroken
    records = len(whole.history.records)
    with pytest.raises(Crash.Crashed):
        train(setting, tmp_path / "run", callbacks=[Crash(max(1, int(share * records)))])
    assert_same(train(setting, resume=tmp_path / "run"), whole)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.2, 0.35, 0.6, 0.7, 0.95, 0.999])
@pytest.mark.slow
def test_a_resume_after_a_crash_at_any_point_is_bit_identical(unbroken, share, tmp_path):
    test_a_resume_after_a_crash_is_bit_identical(unbroken, share, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("unbroken", SETTINGS, indirect=True)
@pytest.mark.parametrize("stop", ["updates=17", "seconds=5.5"])
def test_a_finished_run_can_be_extended(unbroken, stop, tmp_path):
    setting, whole = unbroken
    train(setting, tmp_path / "run", stop=stop)
    longer = train(setting, resume=tmp_path / "run")
    assert longer.stopped_by == whole.stopped_by
    assert torch.equal(parameters_of(longer.model), parameters_of(whole.model))
    # A clock that stops a run is an event of its own; all the others are the same.
    events = [line for line in read(longer) if '"timer_rang"' not in line]
    assert events == [line for line in read(whole) if '"timer_rang"' not in line]


def read(result):
    return (result.folder / EVENTS).read_text().splitlines()


@pytest.mark.slow
def test_an_extended_run_decays_the_rate_to_the_new_end_without_a_second_warm_up(tmp_path):
    job = tiny_job(schedule=pl.plans.LinearSchedule())
    options = {"protocol": "bsp", "cluster": STRAGGLING}
    pl.train(job, stop="gradients=40", out=tmp_path / "run", **options)
    with pytest.raises(UsageError, match=r"schedule total 40, now 80.*allow_change=True"):
        pl.train(job, stop="gradients=80", resume=tmp_path / "run", **options)
    longer = pl.train(job, stop="gradients=80", resume=tmp_path / "run", allow_change=True, **options)
    rates = longer.history.columns()["learning_rate"]
    assert list(rates[9:]) == pytest.approx([0.1 * 2 / 20, *(0.05 * (80 - w) / 60 for w in range(42, 80, 4))])


@pytest.mark.slow
def test_a_run_can_be_stopped_and_resumed_repeatedly(tmp_path):
    whole = train("random walk", tmp_path / "whole")
    part = train("random walk", tmp_path / "run", stop="updates=3")
    for updates in (4, 4, 11, 23, UPDATES):
        part = train("random walk", resume=tmp_path / "run", stop=f"updates={updates}")
    assert_same(part, whole)


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    whole = train("evaluated", tmp_path / "run")
    log = (whole.folder / EVENTS).read_bytes()
    again = train("evaluated", resume=tmp_path / "run")
    assert (again.folder / EVENTS).read_bytes() == log
    assert again.history.totals == whole.history.totals


@pytest.mark.slow
def test_a_reached_target_accuracy_can_be_raised(tmp_path):
    job = {"eval_data": dataset()}
    options = {"protocol": "asp", "cluster": STRAGGLING, "evaluate_every": "updates=3"}
    whole = pl.train(tiny_job(**job), stop="accuracy=0.6,updates=60", out=tmp_path / "whole", **options)
    pl.train(tiny_job(**job), stop="accuracy=0.4,updates=60", out=tmp_path / "run", **options)
    raised = pl.train(tiny_job(**job), stop="accuracy=0.6,updates=60", resume=tmp_path / "run", **options)
    assert_same(raised, whole)


@pytest.mark.slow
@settings(max_examples=6)
@given(share=st.floats(0.01, 0.99), every=st.integers(1, 15))
def test_a_resume_is_exact_for_any_crash_point_and_checkpoint_interval(share, every, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    whole = train("k_batch_async", path / "whole")
    crash = Crash(max(1, int(share * len(whole.history.records))))
    with pytest.raises(Crash.Crashed):
        train("k_batch_async", path / "run", callbacks=[crash], checkpoint_every=f"gradients={every}")
    assert_same(train("k_batch_async", resume=path / "run"), whole)
