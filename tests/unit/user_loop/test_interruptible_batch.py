"""`run.minibatch()`: an interrupt ends the block between two layers, and the rank takes its next batch."""

import time

import torch
from torch import nn

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import BATCH, SAMPLES, loss_of, make_network, make_parts, numbered_data, sgd
from machine_speed import scaled
from paceline.user_loop.hooks.interruptible_batch import InterruptibleBatch
from paceline.worker.gradient_source import Interrupted
from selections import parametrize_few

LIMIT_S = scaled(10.0)
EPOCHS = 2


class WaitOnce(nn.Module):
    """Network that waits in its first forward pass, before its layers, until a condition is true."""

    def __init__(self, network, condition):
        super().__init__()
        self.network = network
        self.condition = condition

    def forward(self, x):
        condition, self.condition = self.condition, None
        deadline_s = time.monotonic() + LIMIT_S
        while condition is not None and not condition():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        return self.network(x)


@parametrize_few("accumulate", [1, 2], keep=1)
def test_an_interrupted_rank_leaves_the_block_before_the_next_layer(accumulate):
    def loop(run, model, optimizer):
        is_slow = model is ranks.parts[1][0]
        if is_slow:
            waiting = WaitOnce(model, lambda: run._tasks.task.is_interrupted)
        forward = waiting if is_slow else model
        ended, number, fates = [], 0, set()
        for _ in run.epochs(EPOCHS):
            for x, y in run.loader:
                number += 1
                fates.add(run.last.fate)
                with run.minibatch():
                    (loss_of(forward, x, y) / accumulate).backward()
                    ended.append(number)
                    if number % accumulate == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        return ended, fates

    parts = make_parts(make_network(), numbered_data(), sgd, batch_size=BATCH // accumulate)
    ranks = AttachedThreads(2, parts, "k_sync(k=1)", accumulate=accumulate)
    _, (ended, fates) = ranks.run(loop)
    assert ended  # blocks
    assert not set(ended) & {*range(1, accumulate + 1)}  # that of the batch that waited, and of the rest of its step
    totals = ranks.server.result.history.totals
    assert totals.interrupted > 0
    assert totals.applied == EPOCHS * SAMPLES // BATCH
    assert "interrupted" in fates


def test_a_step_after_an_interrupted_block_needs_no_loss():
    """The Trainer of transformers steps after each batch, also if its block was left before the loss was known."""

    def loop(run, model, optimizer):
        is_slow = model is ranks.parts[1][0]
        forward = WaitOnce(model, lambda: run._tasks.task.is_interrupted) if is_slow else model
        left = 0
        for _ in run.epochs(EPOCHS):
            for x, y in run.loader:
                left += 1
                with run.minibatch():
                    loss_of(forward, x, y).backward()
                    left -= 1
                optimizer.step()
                optimizer.zero_grad()
        return left

    parts = make_parts(make_network(), numbered_data(), sgd, batch_size=BATCH)
    ranks = AttachedThreads(2, parts, "k_sync(k=1)", stop=f"loss=1e-9,epochs={EPOCHS}")
    _, left = ranks.run(loop)
    assert left > 0
    assert ranks.server.result.history.totals.applied == EPOCHS * SAMPLES // BATCH


def test_an_error_in_the_block_is_raised():
    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for _ in run.loader:
                with run.minibatch():
                    raise KeyError("of the loop")

    for error in AttachedThreads(2, make_parts(make_network(), numbered_data()), "bsp").run(loop):
        assert isinstance(error, KeyError)


def test_alone_the_block_has_no_effect():
    model, optimizer, loader = make_parts(make_network(), numbered_data())()
    run = pl.attach(model, optimizer, loader, protocol="bsp")
    with run.minibatch():
        loss_of(model, *next(iter(run.loader))).backward()
        optimizer.step()
    assert run.update == 1


def test_layers_are_checked_within_a_block_only_and_what_was_computed_is_dropped():
    model, checks, dropped = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [], []

    def check():
        checks.append("check")
        if len(checks) == 2:
            raise Interrupted

    block = InterruptibleBatch(model, check, lambda: dropped.append("dropped"))
    with block:
        model(torch.ones(1))
    assert dropped == ["dropped"]
    model(torch.ones(1))
    assert len(checks) == 2
    with block:
        model(torch.ones(1)).backward()
    assert len(checks) > 4  # backward too
    assert dropped == ["dropped"]
