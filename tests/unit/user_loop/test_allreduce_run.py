"""Attached loops without a server, as threads: equal to DDP and to `pl.train`, every rank steps."""

import copy
import threading

import pytest
import torch
from safetensors.torch import load_file

import paceline as pl
import rank_threads
from allreduce_loops import AllReduceLoops
from allreduce_runs import ALGORITHMS
from attached_replay import job_of
from loop_parts import (
    BATCH,
    SAMPLES,
    adamw,
    check_equal_models,
    derived_sgd,
    loss_of,
    make_parts,
    of_the_mean_gradient,
    sgd,
    step,
    train,
    values,
)
from paceline.recording.run_folder import SavedRun
from selections import parametrize_each_once, parametrize_few

EXACT = 1e-12


@parametrize_few(
    ("make_optimizer", "accumulate", "clip_norm"), [(sgd, 1, 0.01), (adamw, 2, None), (derived_sgd, 1, None)], keep=1
)
def test_all_reduce_steps_by_the_mean_gradient(make_optimizer, accumulate, clip_norm, network, data):
    parts = make_parts(network, data, make_optimizer, batch_size=BATCH // accumulate)
    ranks = AllReduceLoops(3, parts, "all_reduce", accumulate=accumulate, clip_norm=clip_norm)
    steps = ranks.run(train(accumulate=accumulate))
    expected = of_the_mean_gradient(network, make_optimizer, steps, clip_norm)
    for model, _, _ in ranks.parts:
        for ours, theirs in zip(model.parameters(), expected, strict=True):
            assert (ours - theirs).abs().max() < EXACT
    check_equal_models(ranks)


@parametrize_few("protocol", ALGORITHMS, keep=1)
def test_every_protocol_trains_as_a_job_does(protocol, network, data):
    def loop(run, model, optimizer):
        for _ in run.epochs(2):
            for batch in run.loader:
                step(model, optimizer, [batch])

    ranks = AllReduceLoops(3, make_parts(network, data), protocol)
    ranks.run(loop)
    of_job = rank_threads.Job(3, job_of(network, data), protocol=protocol, stop="epochs=2")
    of_job.start_workers()
    result = of_job.serve()
    for ours, theirs in zip(values(ranks.parts[1][0]), result.parameters.values(), strict=True):
        assert (ours - theirs).abs().max() < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["all_reduce", "local_sgd(H=3)", "dc_s3gd"])
def test_a_rank_without_a_last_minibatch_ends_with_the_model_of_the_others(protocol, network, data, tmp_path):
    ranks = AllReduceLoops(5, make_parts(network, data), protocol, out=tmp_path / "run")
    steps = ranks.run(train())
    assert sorted(map(len, steps)) == [4, 5, 5, 5, 5]  # 24 minibatches
    check_equal_models(ranks)
    assert {(run.stopped_by, run.reason) for run in ranks.runs} == {("epochs", "2 epochs, 24 gradients, applied")}
    assert pl.replay(tmp_path / "run").is_same
    saved = load_file(tmp_path / "run/model.safetensors")
    trained = ranks.parts[4][0].state_dict()
    assert all(torch.equal(saved[name], trained[name]) for name in saved)


def test_the_loss_is_that_of_backward(network, data, tmp_path):
    ranks = AllReduceLoops(2, make_parts(network, data), "all_reduce", out=tmp_path / "run")
    [steps, _] = ranks.run(train(epochs=1))
    [[(x, y)], *_] = steps
    expected = loss_of(copy.deepcopy(network), x, y).item()
    arrived = [each for each in SavedRun(tmp_path / "run").history.of(pl.callbacks.GradientArrived) if each.worker == 0]
    assert arrived[0].loss == pytest.approx(expected, rel=1e-9)


def test_dc_s3gd_returns_from_the_step_before_the_sum_has_ended(network, data):
    has_returned = threading.Event()

    def loop(run, model, optimizer):
        rank = ranks.runs.index(run)
        for _ in run.epochs(1):
            for batch in run.loader:
                if rank:
                    assert has_returned.wait(rank_threads.LIMIT_S)
                step(model, optimizer, [batch])
                if not rank:
                    has_returned.set()
        return "ended"

    ranks = AllReduceLoops(2, make_parts(network, data), "dc_s3gd")
    assert ranks.run(loop) == ["ended", "ended"]


class Counting(torch.optim.Optimizer):
    """Optimizer that is not of torch.optim, and counts its steps also if there are no gradients."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "steps": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"] / group["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["all_reduce", "local_sgd(H=3)", "dc_s3gd"])
def test_an_optimizer_of_another_library_makes_one_step_an_update(protocol, network, data):
    def make_optimizer(model):
        return Counting([each for each in model.parameters() if each.requires_grad])

    ranks = AllReduceLoops(3, make_parts(network, data, make_optimizer), protocol)
    assert [len(steps) for steps in ranks.run(train(epochs=1))] == [4, 4, 4]
    assert [optimizer.param_groups[0]["steps"] for _, optimizer, _ in ranks.parts] == [4, 4, 4]
    check_equal_models(ranks)


def test_all_ranks_begin_with_the_model_and_the_optimizer_of_rank_0(network, data):
    made = []

    def make_optimizer(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + len(made)), momentum=0.9)
        made.append(optimizer)
        if len(made) == 1:  # it has stepped before
            model(data.tensors[0]).sum().backward()
            optimizer.step()
        return optimizer

    ranks = AllReduceLoops(2, make_parts(network, data, make_optimizer), "all_reduce", stop="updates=1")
    ranks.run(train())
    check_equal_models(ranks)
    assert [optimizer.param_groups[0]["lr"] for optimizer in made] == [0.1, 0.1]


@parametrize_each_once(everywhere=[False, True], protocol=["all_reduce", "dc_s3gd"])
def test_a_gradient_that_is_not_finite_is_left_out(protocol, everywhere, network, data):
    def loop(run, model, optimizer):
        for epoch in run.epochs(2):
            for i, (x, y) in enumerate(run.loader):
                bad = (epoch, i) == (0, 1) and (everywhere or run is ranks.runs[1])
                step(model, optimizer, [(x * float("inf") if bad else x, y)])
        return run.over

    ranks = AllReduceLoops(2, make_parts(network, data), protocol)
    assert ranks.run(loop) == [True, True]
    check_equal_models(ranks)
    assert all(parameter.isfinite().all() for parameter in ranks.parts[0][0].parameters())


def test_the_parameters_have_their_own_memory_after_the_run(network, data):
    ranks = AllReduceLoops(2, make_parts(network, data), "all_reduce")
    ranks.run(train(epochs=1))
    for model, _, _ in ranks.parts:
        for parameter in model.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_every_sample_is_used_once_in_an_epoch(network, data):
    ranks = AllReduceLoops(3, make_parts(network, data), "local_sgd(H=2)")
    steps = ranks.run(train(epochs=1))
    numbers = sorted(int(number) for done in steps for batches in done for _, y in batches for number in y)
    assert numbers == [*range(SAMPLES)]


@pytest.mark.slow
def test_all_reduce_steps_with_the_learning_rates_of_rank_0(network, data):
    def loop(run, model, optimizer):
        for epoch in run.epochs(2):
            for batch in run.loader:
                step(model, optimizer, [batch])
            if epoch == 0 and run is ranks.runs[0]:
                optimizer.param_groups[1]["lr"] = 0.5
        return [group["lr"] for group in optimizer.param_groups]

    ranks = AllReduceLoops(3, make_parts(network, data), "all_reduce")
    assert ranks.run(loop) == [[0.05, 0.5]] * 3
    check_equal_models(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["all_reduce", "dc_s3gd"])
def test_gradients_may_be_set_to_zero_in_place(protocol, network, data):
    def trained(to_none):
        def loop(run, model, optimizer):
            for _ in run.epochs(2):
                for x, y in run.loader:
                    optimizer.zero_grad(set_to_none=to_none)
                    loss_of(model, x, y).backward()
                    optimizer.step()

        ranks = AllReduceLoops(2, make_parts(network, data), protocol)
        ranks.run(loop)
        return values(ranks.parts[0][0])

    assert all(map(torch.equal, trained(to_none=True), trained(to_none=False)))


def test_the_gradient_of_the_step_is_left_in_the_parameters(network, data):
    norms = {}

    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for batch in run.loader:
                step(model, optimizer, [batch])
                if not run.over:
                    norms.setdefault(run, []).append(float(model.last.weight.grad.norm()))

    AllReduceLoops(2, make_parts(network, data), "all_reduce").run(loop)
    first, second = norms.values()
    assert len(first) > 1
    assert first == second


@parametrize_few("protocol", ["all_reduce", "dc_s3gd"], keep=1)
def test_a_rank_whose_scaler_skips_a_step_goes_on_with_the_others(protocol, network, data):
    def loop(run, model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        for _ in run.epochs(1):
            for i, (x, y) in enumerate(run.loader):
                overflows = i == 1 and run is ranks.runs[1]
                optimizer.zero_grad()
                scaler.scale(loss_of(model, x * float("inf") if overflows else x, y)).backward()
                scaler.step(optimizer)
                scaler.update()
        return scaler.get_scale()

    ranks = AllReduceLoops(2, make_parts(network, data), protocol)
    assert ranks.run(loop) == [8.0, 4.0]
    check_equal_models(ranks)
    assert all(parameter.isfinite().all() for parameter in ranks.parts[0][0].parameters())
