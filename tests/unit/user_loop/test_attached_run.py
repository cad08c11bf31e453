"""Attached loops, as threads: updates are those of the mean gradient, epochs are whole, the end is reported."""

import copy
from collections import Counter

import pytest
import torch

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import (
    BATCH,
    SAMPLES,
    adamw,
    loss_of,
    make_parts,
    of_the_mean_gradient,
    sgd,
    step,
    train,
)
from selections import parametrize_each_once, parametrize_few

EXACT = 1e-12


def counted(steps):
    return Counter(int(number) for done in steps for batches in done for _, y in batches for number in y)


@parametrize_each_once(make_optimizer=[sgd, adamw], accumulate__clip_norm=[(1, 0.01), (2, None)])
def test_bsp_steps_by_the_mean_gradient(make_optimizer, accumulate, clip_norm, network, data):
    parts = make_parts(network, data, make_optimizer, batch_size=BATCH // accumulate)
    ranks = AttachedThreads(3, parts, "bsp", accumulate=accumulate, clip_norm=clip_norm)
    steps = ranks.run(train(accumulate=accumulate))
    expected = of_the_mean_gradient(network, make_optimizer, steps, clip_norm)
    for model, _, _ in ranks.parts:
        for ours, theirs in zip(model.parameters(), expected, strict=True):
            assert (ours - theirs).abs().max() < EXACT
    assert counted(steps) == dict.fromkeys(range(SAMPLES), 2)


@parametrize_few("protocol", ["k_sync(k=2)", "k_batch_async(k=3)", "asp", "dbw"], keep=1)
def test_every_rank_has_the_last_version_and_the_replay_makes_the_same_decisions(protocol, network, data, tmp_path):
    out = tmp_path / "run"
    ranks = AttachedThreads(3, make_parts(network, data), protocol, out=out)
    assert not [each for each in ranks.run(train(epochs=3)) if isinstance(each, BaseException)]
    first, *others = [list(model.state_dict().values()) for model, _, _ in ranks.parts]
    for other in others:
        assert all(map(torch.equal, first, other))
    assert ranks.server.result.stopped_by == "epochs"
    assert pl.replay(out).is_same


def test_the_loss_is_that_of_backward(network, data):
    ranks = AttachedThreads(2, make_parts(network, data, batch_size=2), "bsp", accumulate=2)
    [steps, _] = ranks.run(train(epochs=1, accumulate=2))
    model = copy.deepcopy(network)
    first = sum(loss_of(model, x, y).item() / 2 for x, y in steps[0])
    arrived = [each for each in ranks.server.result.history.of(pl.callbacks.GradientArrived) if each.worker == 0]
    assert arrived[0].loss == pytest.approx(first, rel=1e-9)


def test_a_step_between_the_end_and_finish_names_run_over(network, data):
    def loop(run, model, optimizer):
        for _ in run.epochs(2):
            for batch in run.loader:
                step(model, optimizer, [batch])
            optimizer.step()

    for error in AttachedThreads(2, make_parts(network, data), "bsp", stop="updates=2").run(loop):
        assert isinstance(error, pl.RunError)
        assert "run.over" in str(error)


def test_a_loader_that_does_not_shuffle_keeps_its_order(network, data):
    ranks = AttachedThreads(2, make_parts(network, data, shuffle=False), "bsp")
    steps = ranks.run(train(epochs=1))
    of_updates = [{int(n) for each in done for _, y in each for n in y} for done in zip(*steps, strict=True)]
    assert of_updates == [{*range(first, first + 2 * BATCH)} for first in range(0, SAMPLES, 2 * BATCH)]


def test_a_stop_condition_ends_the_loop(network, data):
    ranks = AttachedThreads(2, make_parts(network, data), "bsp", stop="updates=5")
    steps = ranks.run(train(epochs=100))
    assert [len(each) for each in steps] == [5, 5]
    assert ranks.server.result.stopped_by == "updates"


def test_a_batch_without_a_step_is_an_error(network, data):
    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for _ in run.loader:
                pass


@pytest.mark.slow
def test_a_loop_that_breaks_off_leaves_the_run_to_the_others(network, data):
    def loop(run, model, optimizer):
        if len(first) < 1 and not first.append(run):
            for _ in run.epochs(2):
                step(model, optimizer, [next(iter(run.loader))])
                break
        else:
            train()(run, model, optimizer)

    first = []
    ranks = AttachedThreads(3, make_parts(network, data), "asp")
    answers = ranks.run(loop)
    assert not [each for each in answers if isinstance(each, BaseException)]
    assert ranks.server.result.stopped_by == "epochs"


def test_a_loop_without_an_end_is_refused(network, data):
    def loop(run, model, optimizer):
        next(iter(run.loader))

    for error in AttachedThreads(2, make_parts(network, data), "bsp").run(loop):
        assert isinstance(error, pl.UsageError)
        assert "the run has no end: iterate over run.epochs(10)" in str(error)
