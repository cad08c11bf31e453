"""Attached loops that resume a run with a server: data, learning rates and the server's state go on."""

from itertools import chain

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import BATCH, SAMPLES, adamw, make_parts, step, values
from paceline.cli.saved_options import NEEDED, SavedOptions
from selections import parametrize_few

EXACT = 1e-12
RANKS, EPOCHS = 2, 3
UPDATES = EPOCHS * SAMPLES // BATCH // RANKS


def train(*, per_epoch):
    """Return a loop that returns the samples of its steps."""

    def loop(run, model, optimizer):
        scheduler = StepLR(optimizer, 1, 0.5)
        run.set_scheduler(scheduler)
        samples = []
        for _ in run.epochs(EPOCHS):
            for batch in run.loader:
                step(model, optimizer, [batch])
                samples += map(int, batch[1])
                if not per_epoch:
                    scheduler.step()
            if per_epoch:
                scheduler.step()
        return samples

    return loop


@parametrize_few("per_epoch", [False, True], keep=1)
def test_samples_and_learning_rates_go_on(per_epoch, network, data, tmp_path):
    parts, run = make_parts(network, data, adamw), tmp_path / "run"
    before = AttachedThreads(RANKS, parts, "bsp", stop="updates=8", out=run).run(train(per_epoch=per_epoch))
    resumed = AttachedThreads(RANKS, parts, "bsp", stop=f"epochs={EPOCHS}", resume=run)
    after = resumed.run(train(per_epoch=per_epoch))
    assert sorted(chain.from_iterable(before + after)) == sorted([*range(SAMPLES)] * EPOCHS)
    rates = [update.learning_rate for update in resumed.server.result.history.of(pl.callbacks.UpdateMade)]
    steps = [*range(8), 7, *range(9, UPDATES)]  # the first step after the resume has the rate of the last one before
    if per_epoch:
        steps = [number // (UPDATES // EPOCHS) for number in range(UPDATES)]
    assert rates == [0.01 * 0.5**number for number in steps]
    assert pl.replay(run).is_same


@pytest.mark.slow
def test_a_run_with_local_steps_goes_on_with_its_outer_optimizer(network, data, tmp_path):
    def plain(model):
        return torch.optim.SGD(model.parameters(), lr=0.05)

    parts, run = make_parts(network, data, plain), tmp_path / "run"
    protocol = "bsp + local_steps(H=2, outer='nesterov(lr=0.7, momentum=0.5)')"
    before = AttachedThreads(1, parts, protocol, stop="updates=8", out=run)
    resumed = AttachedThreads(1, parts, protocol, stop=f"epochs={EPOCHS}", resume=run)
    whole = AttachedThreads(1, parts, protocol, stop=f"epochs={EPOCHS}")
    samples = before.run(train(per_epoch=True)) + resumed.run(train(per_epoch=True))
    assert [[*chain.from_iterable(samples)]] == whole.run(train(per_epoch=True))
    for ours, theirs in zip(values(resumed.parts[0][0]), values(whole.parts[0][0]), strict=True):
        assert (ours - theirs).abs().max() < EXACT
    assert pl.replay(run).is_same


def test_the_command_line_says_how_such_a_run_is_resumed(network, data, tmp_path):
    run = tmp_path / "run"
    AttachedThreads(RANKS, make_parts(network, data), "bsp", stop="updates=2", out=run).run(train(per_epoch=False))
    with pytest.raises(pl.UsageError, match=r"start its script with attach\(\.\.\., resume="):
        SavedOptions(dict.fromkeys(NEEDED)).completed(run)
