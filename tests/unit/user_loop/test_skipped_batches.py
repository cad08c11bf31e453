"""Batches that a loop skips: without a gradient, by `run.skip()`, or by mistake."""

import pytest
import torch

import paceline as pl
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import SAMPLES, check_equal_models, loss_of, make_network, make_parts, numbered_data
from selections import parametrize_each_once, parametrize_few

BAD = 3  # step of rank 0 that is skipped
MINIBATCHES = SAMPLES // 4


def before_backward(run, optimizer, loss):
    pass


def after_backward(run, optimizer, loss):
    loss.backward()
    optimizer.zero_grad()


def by_skip(run, optimizer, loss):
    loss.backward()
    run.skip()


def by_a_step_without_gradient(run, optimizer, loss):
    optimizer.zero_grad()
    optimizer.step()


WAYS = [before_backward, after_backward, by_skip, by_a_step_without_gradient]


def skipping(way, bad=BAD):
    """Return a loop of one epoch that skips a batch of rank 0."""

    def loop(run, model, optimizer):
        steps = 0
        for _ in run.epochs(1):
            for x, y in run.loader:
                steps += 1
                loss = loss_of(model, x, y)
                if run is runs[0] and steps == bad:
                    way(run, optimizer, loss)
                    continue
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return steps

    runs = []
    return lambda run, *parts: (runs.append(run), loop(run, *parts))[1]


@parametrize_few("way", WAYS, keep=1)
def test_a_skipped_batch_is_not_used(way, tmp_path):
    ranks = AttachedThreads(2, make_parts(make_network(), numbered_data()), "bsp", out=tmp_path / "run")
    assert sum(ranks.run(skipping(way))) == MINIBATCHES
    history = ranks.server.result.history
    dropped = [each.reason for each in history.of(pl.callbacks.GradientArrived) if not each.used]
    assert dropped == ["its loop skipped the step"]
    assert ranks.server.result.stopped_by == "epochs"
    check_equal_models(ranks)
    assert pl.replay(tmp_path / "run").is_same


@parametrize_each_once(way=WAYS, protocol=["all_reduce", "local_sgd(H=2)"])
def test_without_a_server_the_other_ranks_go_on(way, protocol):
    ranks = AllReduceLoops(2, make_parts(make_network(), numbered_data()), protocol)
    assert sum(ranks.run(skipping(way))) == MINIBATCHES
    check_equal_models(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_local_step_is_left_out_of_its_work(way):
    parts = make_parts(make_network(), numbered_data())
    ranks = AttachedThreads(2, parts, "bsp + local_steps(H=3, outer='sgd(lr=1)')")
    assert sum(ranks.run(skipping(way))) == MINIBATCHES
    check_equal_models(ranks)


def test_a_first_batch_is_skipped_by_name_only():
    ranks = AttachedThreads(1, make_parts(make_network(), numbered_data()), "bsp")
    [error] = ranks.run(skipping(before_backward, bad=1))
    assert "to skip a batch, call run.skip()" in str(error)
    for way in (after_backward, by_skip):
        ranks = AttachedThreads(1, make_parts(make_network(), numbered_data()), "bsp")
        assert ranks.run(skipping(way, bad=1)) == [MINIBATCHES]


def test_a_skipped_batch_of_an_accumulated_step_is_left_out_of_it():
    def loop(run, model, optimizer):
        weights = []
        for _ in run.epochs(1):
            for number, (x, y) in enumerate(run.loader):
                loss_of(model, x, y).backward()
                if number % 2 == 0:
                    run.skip()
                    continue
                expected = model.last.weight - 0.5 * model.last.weight.grad
                optimizer.step()
                weights.append((model.last.weight - expected).abs().max().item())
        return weights

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.5)

    ranks = AttachedThreads(1, make_parts(make_network(), numbered_data(), sgd), "bsp", accumulate=2)
    [differences] = ranks.run(loop)
    assert len(differences) == MINIBATCHES // 2
    assert max(differences) < 1e-12


def looks_ahead(run, model, optimizer):
    for _ in run.epochs(1):
        batches = iter(run.loader)
        ahead = next(batches, None)
        while ahead is not None:
            (x, y), ahead = ahead, next(batches, None)
            loss_of(model, x, y).backward()
            optimizer.step()


def forgets_the_step(run, model, optimizer):
    for _ in run.epochs(1):
        for x, y in run.loader:
            loss_of(model, x, y).backward()


@parametrize_few(
    ("loop", "advice"),
    [(looks_ahead, "num_workers= in place of a prefetcher"), (forgets_the_step, "if a step takes more batches")],
    keep=1,
)
def test_a_batch_without_a_step_is_an_error_by_mistake(loop, advice):
    for error in AttachedThreads(2, make_parts(make_network(), numbered_data()), "bsp").run(loop):
        assert isinstance(error, pl.RunError)
        assert "optimizer.step() was not called after 1 batch of run.loader" in str(error)
        assert advice in str(error)
