"""Losses of attached loops: what is read, and loops whose loss cannot be seen."""

import torch

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import loss_of, make_network, make_parts, numbered_data
from paceline.user_loop.hooks.loss_reader import LossReader
from selections import parametrize_few


def hidden(run, loss, parameters):
    """Compute gradients in a way that shows no loss."""
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def given(run, loss, parameters):
    run.backward(loss)


def train(backward):
    def loop(run, model, optimizer):
        parameters = [each for each in model.parameters() if each.requires_grad]
        for _ in run.epochs(2):
            for x, y in run.loader:
                optimizer.zero_grad()
                backward(run, loss_of(model, x, y), parameters)
                optimizer.step()
        return run.stopped_by

    return loop


@parametrize_few(("protocol", "stop"), [("dbw", None), ("adasync", None), ("bsp", "loss=0.01,epochs=2")], keep=1)
def test_a_run_that_needs_the_loss_is_refused_without_one(protocol, stop):
    ranks = AttachedThreads(2, make_parts(make_network(), numbered_data()), protocol, stop=stop)
    for error in ranks.run(train(hidden)):
        assert isinstance(error, pl.RunError)
        assert "needs the loss" in str(error)
        assert "call run.backward(loss)" in str(error)


def test_a_run_that_needs_no_loss_trains_without_one():
    ranks = AttachedThreads(2, make_parts(make_network(), numbered_data()), "bsp")
    assert ranks.run(train(hidden)) == ["epochs", "epochs"]
    arrived = ranks.server.result.history.of(pl.callbacks.GradientArrived)
    assert all(each.used and each.loss != each.loss for each in arrived)


def test_a_loss_that_is_given_is_read_once():
    ranks = AttachedThreads(2, make_parts(make_network(), numbered_data()), "dbw")
    assert ranks.run(train(given)) == ["epochs", "epochs"]
    losses = [each.loss for each in ranks.server.result.history.of(pl.callbacks.GradientArrived)]
    assert all(0 < loss < 1 for loss in losses)


def test_the_losses_of_several_calls_are_added():
    reader = LossReader(lambda loss: None)
    try:
        x = torch.ones(2, requires_grad=True)
        x.sum().backward()
        reader.backward(3 * x.sum())
        (2 * x).backward(torch.ones(2))  # no scalar
        assert reader.take() == 8.0
        assert reader.take() is None
    finally:
        reader.close()
