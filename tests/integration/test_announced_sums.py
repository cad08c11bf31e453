"""Ranks without a server that sum the gradients that count: parameters, records, checkpoints and losses."""

import json
import signal
from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.checkpoint.store import STATE
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import UpdateApplied
from paceline.core.records import DecisionMade, GradientArrived, UpdateMade, VersionEvaluated
from paceline.recording.run_folder import CHECKPOINTS
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model
from rank_threads import run
from ranks import flat
from selections import parametrize_few
from tiny_jobs import batch_norm_net, dataset, largest_relative_difference, parameters_of, tiny_job
from tiny_tokens import Model, mean_over_tokens, sequences, tokens_of

EXACT = 1e-12
SUMS = {"server": False}
ADAM = partial(torch.optim.AdamW, lr=0.01)


def simulated(job, n, **settings):
    return pl.train(job, cluster=pl.Cluster(n), seed=1, **settings)


def assert_is_simulation(ends, job, **settings):
    expected = flat(simulated(job, len(ends), **settings).model.state_dict())
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), expected) < EXACT
    assert len({tuple(flat(end.parameters).tolist()) for end in ends}) == 1, "all ranks have the same bits"


JOBS = {
    "momentum": {},
    "adam, epochs": {"optimizer": ADAM, "sampling": "epoch"},
    "buffers": {"model": batch_norm_net},
    "clipped": {"clip_norm": 0.1},
    "schedule": {"sampling": "epoch", "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=20)},
    "noise": {"lr_rule": "noise", "microbatches": 2},
    "tokens": {"model": Model, "loss": None, "step": mean_over_tokens, "data": sequences(48), "weight": tokens_of},
}


@parametrize_few("job", JOBS.values(), ids=JOBS, keep=1)
def test_parameters_of_bsp_are_those_of_a_server(job):
    job, settings = tiny_job(**job), {"protocol": "bsp", "stop": "updates=15"}
    assert_is_simulation(run(3, job, SUMS, **settings), job, **settings)


@parametrize_few("protocol", ["balanced(m=4)", "balanced(m=4, leases=1)"], keep=1)
def test_parameters_of_balanced_are_those_of_bsp(protocol):
    job = tiny_job(sampling="epoch")
    ends = run(3, job, SUMS, protocol=protocol, stop="updates=12")
    assert_is_simulation(ends, job, protocol="bsp", stop="updates=12")
    if protocol == "balanced(m=4)":
        of_first = [each.draw for each in ends[0].of(GradientArrived) if each.worker == 0]
        assert max(of_first) > 12, "a worker has several gradients in an update"


FRESH = ["bsp", "backup(k=2)", "k_sync(k=2)", "pull(k=5)", "k_batch_sync(k=5)", "dbw", "b_dbw", "adasync", "patient"]
CHOSEN = ["auto(fresh=true)", "auto(candidates=['pull(k=3)', 'balanced(m=4)', 'k_sync(k=1)'])"]


@parametrize_few("protocol", FRESH, keep=1)
def test_a_recorded_run_replays_and_all_ranks_have_the_same_bits(protocol, tmp_path):
    ends = run(3, tiny_job(), SUMS, protocol=protocol, stop="updates=20", out=tmp_path / "run")
    assert [end.stopped_by for end in ends] == ["updates"] * 3
    assert len({tuple(flat(end.parameters).tolist()) for end in ends}) == 1
    assert pl.replay(tmp_path / "run").is_same
    assert len(ends[0].of(UpdateMade)) == 20


@parametrize_few("protocol", CHOSEN, keep=1)
def test_auto_chooses_among_fresh_protocols(protocol, tmp_path):
    sleeping = {"slowness": pl.Cluster(3, pl.timing.Exponential(0.005))}
    ends = run(3, tiny_job(), SUMS | sleeping, protocol=protocol, stop="gradients=240", out=tmp_path / "run")
    assert len({tuple(flat(end.parameters).tolist()) for end in ends}) == 1, "all ranks have the same bits"
    assert [each for each in ends[0].of(DecisionMade) if each.kind in {"auto", "protocol"} and each.numbers], "compared"
    assert pl.replay(tmp_path / "run").is_same


def by_the_log(end, job):
    """Return the parameters after the updates of a log, each by the mean of its gradients at their versions."""
    model, replica = build_model(job, 1), Replica(job, 1, 3)
    optimizer = job.optimizer(model.parameters())
    versions, used = [parameters_of(model)], [each for each in end.of(GradientArrived) if each.used]
    version, gradient = replica.layout.allocate(), replica.layout.allocate()
    for made in end.of(UpdateMade):
        optimizer.zero_grad()
        for each in [used.pop(0) for _ in range(made.k)]:
            nn.utils.vector_to_parameters(versions[each.version], version.parameters)
            replica.gradient(each.worker, each.draw, None, version, gradient)
            for parameter, view in zip(model.parameters(), gradient.parameters, strict=True):
                parameter.grad = view / made.k + (0 if parameter.grad is None else parameter.grad)
        optimizer.step()
        versions.append(parameters_of(model))
    return versions[-1]


@parametrize_few("protocol", ["k_async(k=2)", "k_batch_async(k=3)", "k_sync(k=2)"], keep=2)
def test_each_gradient_is_that_of_its_version(protocol):
    sleeping = {"slowness": pl.Cluster(3, pl.timing.Deterministic(0.003), speed=[1, 1, 0.3])}
    job = tiny_job()
    ends = run(3, job, SUMS | sleeping, protocol=protocol, stop="updates=30")
    stalest = max(each.staleness for each in ends[0].of(GradientArrived) if each.used)
    assert (stalest > 0) == ("async" in protocol)
    expected = by_the_log(ends[0], job)
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), expected) < EXACT


class Parts(nn.Module):
    """Two parts, of which a minibatch trains one."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(5, 3).double() for _ in range(3)])

    def forward(self, x):
        return self.parts[int(x.sum() > 0)](x)


def test_a_parameter_without_a_gradient_is_not_stepped():
    decaying = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    job, settings = tiny_job(model=Parts, optimizer=decaying), {"protocol": "bsp", "stop": "updates=3"}
    ends = run(3, job, SUMS, **settings)
    assert_is_simulation(ends, job, **settings)
    before = simulated(job, 3, protocol="bsp", stop="updates=1").model.state_dict()
    assert torch.equal(ends[0].parameters["parts.2.weight"], before["parts.2.weight"])


def test_versions_are_evaluated():
    job = tiny_job(eval_data=dataset())
    settings = {"protocol": "bsp", "stop": "updates=10", "evaluate_every": "updates=3"}
    ours, theirs = run(3, job, SUMS, **settings)[0], run(4, job, **settings)[0]
    evaluated = [{each.version: each.metrics["loss"] for each in end.of(VersionEvaluated)} for end in (ours, theirs)]
    both = evaluated[0].keys() & evaluated[1].keys()  # the last one may end after the run
    assert len(both) >= 2
    assert {version: evaluated[0][version] for version in both} == pytest.approx(
        {version: evaluated[1][version] for version in both}, rel=1e-9
    )


@parametrize_few("protocol", ["bsp", "pull(k=5)"], keep=1)
def test_a_run_is_resumed_with_its_optimizer(protocol, tmp_path):
    job = tiny_job(optimizer=ADAM, sampling="epoch")
    settings = {"protocol": protocol, "out": tmp_path / "run"}
    run(3, job, SUMS, **settings, stop="updates=9")
    settings = {"protocol": protocol, "resume": tmp_path / "run"}
    ends = run(3, job, SUMS, **settings, stop="updates=15")
    if protocol == "bsp":
        assert_is_simulation(ends, job, protocol="bsp", stop="updates=15")
    assert pl.replay(tmp_path / "run").is_same


class StopWithin(pl.callbacks.Callback):
    """Interrupts the run when two of the gradients of an update have been accepted."""

    def on_record(self, record):
        super().on_record(record)
        if isinstance(record, GradientArrived):
            self.held = self.held + 1 if record.used else self.held
            if self.held == 2 and self.updates == 4:
                signal.raise_signal(signal.SIGTERM)
        elif isinstance(record, UpdateMade):
            self.updates += 1
            self.held = 0

    updates = held = 0


def test_what_was_accepted_before_the_end_counts_when_the_run_goes_on(tmp_path):
    job, settings = tiny_job(sampling="epoch"), {"protocol": "pull(k=5)"}
    first = run(3, job, SUMS, **settings, stop="updates=9", out=tmp_path / "run", callbacks=[StopWithin()])[0]
    assert first.stopped_by == "interrupted"
    newest = max((tmp_path / "run" / CHECKPOINTS).glob("*-update-*/" + STATE), key=lambda each: each.stat().st_mtime_ns)
    assert json.loads(newest.read_bytes())["state"]["server"]["samples"] == 2 * job.batch_size
    [end, *_] = run(3, job, SUMS, **settings, stop="updates=5", resume=tmp_path / "run")
    fifth = end.of(UpdateMade)[-1]
    assert (fifth.version, fifth.k) == (5, 5)
    assert pl.replay(tmp_path / "run").is_same


def test_a_gradient_that_is_not_finite_is_left_out():
    faults = {"faults": [pl.Fault(worker=1, draw=3, kind="not_finite")]}
    [end, *_] = run(3, tiny_job(), SUMS | faults, protocol="bsp", stop="updates=8")
    assert [each.reason for each in end.of(GradientArrived) if not each.used] == ["not finite"]
    assert end.stopped_by == "updates"


def test_parameters_that_are_not_finite_end_the_run():
    ends = run(3, tiny_job(optimizer=partial(torch.optim.SGD, lr=float("inf"))), SUMS, protocol="bsp", stop="updates=8")
    assert {end.stopped_by for end in ends} == {"not_finite"}


@pytest.mark.parametrize("protocol", ["pull(k=5)", "backup(k=2)"])
def test_no_event_comes_between_an_update_and_its_measured_step(protocol, monkeypatch):
    handle, between, applied = Coordinator.handle, [], []

    def watched(coordinator, event):
        (applied if isinstance(event, UpdateApplied) else between if coordinator.awaits_step else []).append(event)
        return handle(coordinator, event)

    monkeypatch.setattr(Coordinator, "handle", watched)
    run(3, tiny_job(), SUMS, protocol=protocol, stop="updates=20", measure_steps=True)
    assert len(applied) == 20
    assert between == []
