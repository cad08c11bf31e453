"""Attached loops with a GradScaler: skipped steps, the factor on the loss, fused optimizers."""

import copy

import pytest
import torch
from torch.amp import GradScaler

import paceline as pl
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import loss_of, make_network, make_parts, numbered_data
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
    assert [each.reason for each in dropped] == ["its loop skipped the step"] * 2
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
    assert len(skipped) == sum(count > 1 for count in steps)  # a busy machine may leave all but one to one rank


def test_the_scaler_is_restored_at_the_end():
    before = GradScaler.step, GradScaler.scale, GradScaler.unscale_
    AttachedThreads(1, make_parts(make_network(), numbered_data()), "bsp").run(train_scaled(()))
    assert (GradScaler.step, GradScaler.scale, GradScaler.unscale_) == before
