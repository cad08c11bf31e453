"""Attached loops with a GradScaler: skipped steps, the factor on the loss, fused optimizers."""

import copy
from contextlib import closing

import pytest
import torch
from torch.amp import GradScaler

import paceline as pl
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import loss_of, make_network, make_parts, numbered_data
from paceline.core.gradient import OVERFLOW
from paceline.user_loop.hooks.scaler_watch import ScalerWatch
from selections import parametrize_few

SCALE = 1024.0


def train_scaled(overflows, zero_grad_last=False, factor=float("inf")):
    """Return a loop of two epochs whose gradient overflows in these steps of rank 0; it returns its scaler."""

    def loop(run, model, optimizer):
        scaler = GradScaler("cpu", init_scale=SCALE)
        steps = 0
        for _ in run.epochs(2):
            for x, y in run.loader:
                if not zero_grad_last:
                    optimizer.zero_grad()
                loss = loss_of(model, x, y)
                scaler.scale(loss).backward()
                if run is runs[0] and steps in overflows:
                    model.last.weight.grad.mul_(factor)
                scaler.step(optimizer)
                scaler.update()
                if zero_grad_last:
                    optimizer.zero_grad()
                steps += 1
        return scaler

    runs = []
    return lambda run, *parts: (runs.append(run), loop(run, *parts))[1]


@parametrize_few("zero_grad_last", [False, True], keep=1)
def test_a_skipped_step_is_dropped_and_the_run_goes_on(zero_grad_last, tmp_path):
    ranks = AttachedThreads(2, make_parts(make_network(), numbered_data()), "asp", out=tmp_path / "run")
    scalers = ranks.run(train_scaled({0, 2}, zero_grad_last))
    assert sorted(scaler.get_scale() for scaler in scalers) == [SCALE / 4, SCALE]
    dropped = [each for each in ranks.server.result.history.of(pl.callbacks.GradientArrived) if not each.used]
    assert [each.reason for each in dropped] == [OVERFLOW] * 2
    assert ranks.server.result.stopped_by == "epochs"
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.slow
def test_without_a_server_the_other_ranks_step_without_the_skipped_gradient(tmp_path):
    ranks = AllReduceLoops(2, make_parts(make_network(), numbered_data()), "all_reduce", out=tmp_path / "run")
    scalers = ranks.run(train_scaled({1}))
    assert sorted(scaler.get_scale() for scaler in scalers) == [SCALE / 2, SCALE]
    first, second = ([*model.parameters()] for model, _, _ in ranks.parts)
    assert all(map(torch.equal, first, second))
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.slow
def test_the_loss_is_that_before_scaling():
    network = make_network()
    ranks = AttachedThreads(2, make_parts(network, numbered_data(), shuffle=False), "bsp")
    ranks.run(train_scaled(()))
    first = min(ranks.server.result.history.of(pl.callbacks.GradientArrived), key=lambda each: (each.draw, each.worker))
    data = numbered_data()
    expected = {
        loss_of(copy.deepcopy(network), data.tensors[0][i : i + 4], data.tensors[1][i : i + 4]).item() for i in (0, 4)
    }
    assert min(abs(first.loss - each) for each in expected) < 1e-6


def test_a_fused_optimizer_with_a_scaler_is_refused():
    def adam(model):
        return torch.optim.Adam(model.parameters(), fused=True)

    errors = AttachedThreads(2, make_parts(make_network(), numbered_data(), adam), "bsp").run(train_scaled(()))
    assert any(isinstance(error, pl.UsageError) for error in errors)  # the other one may get the end of the run first
    assert all("give the optimizer fused=False" in str(error) for error in errors)


def test_a_loop_that_skips_by_itself_is_settled_at_the_next_batch():
    def loop(run, model, optimizer):
        steps = 0
        for _ in run.epochs(1):
            for x, y in run.loader:
                optimizer.zero_grad()
                (loss_of(model, x, y) * (torch.inf if steps == 1 else 1.0)).backward()
                if model.last.weight.grad.isfinite().all():
                    optimizer.step()
                steps += 1
        return steps

    ranks = AttachedThreads(2, make_parts(make_network(), numbered_data()), "asp")
    steps = ranks.run(loop)
    assert sum(steps) == 12
    skipped = [each for each in ranks.server.result.history.of(pl.callbacks.GradientArrived) if not each.used]
    assert {each.reason for each in skipped} == {OVERFLOW}
    assert len(skipped) == sum(count > 1 for count in steps)  # a busy machine may leave all but one to one rank


def test_the_scaler_is_restored_at_the_end():
    before = GradScaler.step, GradScaler.scale, GradScaler.unscale_, GradScaler.update
    AttachedThreads(1, make_parts(make_network(), numbered_data()), "bsp").run(train_scaled(()))
    assert (GradScaler.step, GradScaler.scale, GradScaler.unscale_, GradScaler.update) == before


def test_a_scaler_is_updated_as_before_while_the_run_has_not_begun():
    def loop(run, model, optimizer):
        scaler, parameter = GradScaler("cpu", init_scale=SCALE, growth_interval=1), torch.nn.Parameter(torch.ones(1))
        warm_up = torch.optim.SGD([parameter], lr=0.1)
        scaler.scale(parameter.sum()).backward()
        scaler.step(warm_up)
        scaler.update()
        run.finish()
        return scaler.get_scale()

    parts = make_parts(make_network(), numbered_data())
    assert AttachedThreads(1, parts, "balanced(m=2)", stop="updates=1").run(loop) == [2 * SCALE]


@pytest.fixture
def watched():
    """Return a function that makes a step with a scaler that is watched, and the watch."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    keeps = []
    watch = ScalerWatch([optimizer], lambda: None, lambda index, step: step(), lambda: keeps[-1])

    def step(scaler, *, is_part, factor=1.0, **update):
        keeps.append(is_part)
        parameter.grad = None
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update(**update)
        return scaler.get_scale()

    with closing(watch):
        yield step, watch


def test_the_scale_changes_once_for_each_update(watched):
    step, _ = watched
    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    scales = [step(scaler, is_part=is_part) for is_part in (True, True, False, True, True, False, True)]
    assert scales == [SCALE] * 5 + [2 * SCALE] * 2
    assert step(scaler, is_part=True, new_scale=3.0) == 3.0  # that of the user
    assert step(scaler, is_part=False, factor=torch.inf) == 1.5


def test_an_overflow_of_another_rank_lowers_the_scale_as_an_own_one_does(watched):
    step, watch = watched
    scalers = [GradScaler("cpu", init_scale=SCALE, growth_interval=2) for _ in range(2)]
    for scaler in scalers:
        step(scaler, is_part=False)
    step(scalers[0], is_part=False, factor=torch.inf)
    step(scalers[1], is_part=True)
    watch.lower()
    states = [scaler.state_dict() for scaler in scalers]
    assert states[0] == states[1]
    assert states[0]["scale"] == SCALE / 2
    assert step(scalers[1], is_part=False) == SCALE / 2
    assert step(scalers[1], is_part=False) == SCALE


def test_an_overflow_before_the_first_batch_of_a_rank_lowers_its_scale_too(watched):
    step, watch = watched
    watch.lower()
    watch.lower()
    assert step(GradScaler("cpu", init_scale=SCALE), is_part=True) == SCALE / 4
