"""What the server sees of numbers that are not finite, in the pass that adds and steps."""

from functools import partial
from math import inf, nan

import pytest
import torch
from torch import nn

from loaded_loops import use_loops
from paceline.core.events import Accept, Apply
from paceline.server import kernels
from paceline.server.parameter_server import ParameterServer
from paceline.tensors import mean_loops
from paceline.tensors.finite import are_finite, check_sum
from paceline.tensors.flat_buffers import FlatLayout
from paceline.worker.torch_utils import build_model
from tiny_jobs import tiny_job

SGD, ADAM = torch.optim.SGD, torch.optim.Adam
OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.1),
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(ADAM, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1),
}


@pytest.fixture(params=["torch", "loops"], autouse=True)
def arithmetic(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(kernels, "exact_loops", lambda kind, dtype: None)
        monkeypatch.setattr(mean_loops, "exact_loops", lambda dtype: None)
    else:
        pytest.importorskip("numba")
        use_loops(monkeypatch)


def net():
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3).double())


def server_of(optimizer, **settings):
    job = tiny_job(model=net, optimizer=OPTIMIZERS[optimizer], **settings)
    model = build_model(job, 0)
    return ParameterServer(job, model, FlatLayout(model), per_epoch=10)


def update(server, number, change=lambda worker, gradient: None, accumulates=False):
    """Make an update of three gradients of the workers 10, 11 and 12; those with an even number write a new version."""
    layout = FlatLayout(server.model)
    for worker in (10, 11, 12):
        gradient = layout.allocate()
        gradient.memory.zero_()
        change(worker, gradient)
        server.enqueue(gradient, 8, worker=worker)
        if accumulates:
            server.accumulate()
    accepted = tuple(Accept(worker=worker, draw=number, staleness=0, samples=8) for worker in (10, 11, 12))
    server.apply(
        Apply(version=number, gradients=accepted, lr_scale=1.0, reason=""),
        layout.allocate() if number % 2 == 0 else None,
    )
    return server.not_finite


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("guilty", "value", "number", "accumulates", "clip_norm"),
    [(10, nan, 3, True, None), (11, inf, 4, True, 1.0), (12, -inf, 3, True, None), (10, nan, 4, False, None)],
)
def test_the_worker_of_a_gradient_that_is_not_finite_is_named(optimizer, guilty, value, number, accumulates, clip_norm):
    server = server_of(optimizer, clip_norm=clip_norm)
    assert update(server, 1) == update(server, 2) == ""

    def poison(worker, gradient):
        if worker == guilty:
            gradient.flat_parameters[-1][-1] = value

    found = update(server, number, poison, accumulates)
    assert f"update {number} are not finite, because the gradient of worker {guilty} is not" in found
    assert update(server, number + 1) == found  # the first cause is kept
    assert not are_finite(server.model.parameters())


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_a_step_that_is_too_large_is_no_fault_of_a_worker(optimizer):
    server = server_of(optimizer)
    for _ in range(3):
        assert update(server, 1) == ""
    server.optimizer.param_groups[0]["lr"] = 1e30

    def enlarge(worker, gradient):
        gradient.flat_parameters[0].fill_(1e30)

    assert "though its gradients are; lower the learning rate" in update(server, 2, enlarge)


def test_a_change_of_buffers_that_is_not_finite_is_found():
    server = server_of("sgd")

    def poison(worker, gradient):
        gradient.flat_buffers[0][0] = nan

    assert "are not finite" in update(server, 1, poison)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_large_numbers_are_finite(dtype):
    limits = torch.finfo(dtype)
    full = torch.full((1000,), limits.max, dtype=dtype)
    assert are_finite([full, -full, torch.arange(5), torch.ones(2, dtype=torch.bool)])
    full[7] = inf
    assert not are_finite([full])
    assert not torch.isfinite(check_sum(full))
