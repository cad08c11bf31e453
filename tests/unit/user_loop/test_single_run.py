"""Loop of one process that torchrun has not started: the attributes of an attached run, and clipping."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

LR = 0.5


@pytest.fixture
def parts():
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    data = TensorDataset(torch.ones(6, 2), torch.zeros(6, 1))
    return model, torch.optim.SGD(model.parameters(), lr=LR), DataLoader(data, batch_size=2)


def test_its_progress_counts_the_steps(parts):
    model, optimizer, loader = parts
    scheduler = StepLR(optimizer, 3, gamma=0.1)
    run = pl.attach(model, optimizer, loader, protocol="bsp", scheduler=scheduler)
    for _ in run.epochs(2):
        for x, y in run.loader:
            optimizer.zero_grad()
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
    assert (run.update, run.workload, run.last) == (6, 6, ("used", 0))
    assert run.lr == pytest.approx(LR * 0.01)
    assert (run.over, run.stopped_by) == (True, "epochs")
    optimizer.step()
    assert run.update == 6


@pytest.mark.parametrize("by_closure", [False, True])
def test_it_clips_the_gradient_of_each_step(parts, by_closure):
    model, optimizer, loader = parts
    run = pl.attach(model, optimizer, loader, protocol="bsp", clip_norm=0.1)
    x, y = next(iter(run.loader))

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    before = model.weight.detach().clone()
    if by_closure:
        assert optimizer.step(closure).item() == pytest.approx(16.0)
    else:
        closure()
        optimizer.step()
    assert torch.linalg.vector_norm(model.weight - before).item() == pytest.approx(LR * 0.1)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("is_unscaled", [False, True])
def test_it_clips_the_gradient_without_the_scale_of_a_scaler(parts, fused, is_unscaled):
    model, _, loader = parts
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, fused=fused)
    run = pl.attach(model, optimizer, loader, protocol="bsp", clip_norm=0.1)
    scaler = GradScaler("cpu")
    before = model.weight.detach().clone()
    x, y = next(iter(run.loader))
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    if is_unscaled:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.linalg.vector_norm(model.weight - before).item() == pytest.approx(LR * 0.1)


def test_a_step_that_a_fused_optimizer_skips_is_no_update(parts):
    model, _, loader = parts
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, fused=True)
    run = pl.attach(model, optimizer, loader, protocol="bsp", clip_norm=0.1)
    scaler = GradScaler("cpu")
    before = model.weight.detach().clone()
    for factor, expected in [(torch.inf, (0, "skipped")), (1.0, (1, "used"))]:
        optimizer.zero_grad()
        scaler.scale(model.weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (run.update, run.last.fate) == expected
        assert torch.equal(model.weight, before) == (expected[0] == 0)
