"""Gradients that a loop changes before its step are noticed; what torch changes itself is not."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from loop_parts import loss_of, make_network, numbered_data
from paceline.user_loop.hooks.change_watch import WATCHED_STEPS, ChangeWatch


@pytest.fixture
def model():
    return make_network()


def parameters_of(model):
    return [each for each in model.parameters() if each.requires_grad]


def backward(model, parts=1):
    x, y = numbered_data().tensors
    for _ in range(parts):
        (loss_of(model, x, y) / parts).backward()


def clip_norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def clip_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 1e9)


def scale(model):
    for parameter in parameters_of(model):
        parameter.grad.mul_(0.5)


@pytest.mark.parametrize("change", [clip_norm, clip_value, scale])
def test_a_change_is_told_once(change, model, caplog):
    watch = ChangeWatch(parameters_of(model))
    for _ in range(3):
        model.zero_grad()
        backward(model)
        change(model)
        watch.on_step(parameters_of(model))
    assert caplog.text.count("give clip_norm= to attach instead") == 1


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_accumulation_and_tied_weights_are_no_change(parts, set_to_none, model, caplog):
    watch = ChangeWatch(parameters_of(model))
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        backward(model, parts)
        watch.on_step(parameters_of(model))
    assert not caplog.text


def test_a_parameter_without_a_gradient_in_this_step_is_no_change(caplog):
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    watch = ChangeWatch([used, unused])
    (used + unused).sum().backward()
    watch.on_step([used, unused])
    for parameter in (used, unused):
        parameter.grad.zero_()
    used.sum().backward()
    watch.on_step([used, unused])
    assert not caplog.text


def test_gradients_that_are_views_of_one_tensor_are_no_change(model, caplog):
    parameters = parameters_of(model)
    flat = torch.zeros(sum(each.numel() for each in parameters), dtype=torch.float64)
    for parameter, view in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
        parameter.grad = view.view_as(parameter)
    watch = ChangeWatch(parameters)
    backward(model)
    watch.on_step(parameters)
    assert not caplog.text
    backward(model)
    clip_norm(model)
    watch.on_step(parameters)
    assert "give clip_norm= to attach" in caplog.text


def test_unscaled_gradients_are_no_change_after_a_reset(model, caplog):
    parameters = parameters_of(model)
    watch = ChangeWatch(parameters)
    scaler, optimizer = GradScaler("cpu"), torch.optim.SGD(parameters)
    x, y = numbered_data().tensors
    scaler.scale(loss_of(model, x, y)).backward()
    scaler.unscale_(optimizer)
    watch.reset(parameters)
    watch.on_step(parameters)
    assert not caplog.text


def test_the_hooks_are_removed_after_the_first_steps(model):
    watch = ChangeWatch(parameters_of(model))
    for _ in range(WATCHED_STEPS):
        assert all(each._post_accumulate_grad_hooks for each in parameters_of(model))
        watch.on_step(parameters_of(model))
    assert not any(each._post_accumulate_grad_hooks for each in parameters_of(model))
