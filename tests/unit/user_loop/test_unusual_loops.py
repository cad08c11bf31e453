"""Unusual loops: a compiled model, a second optimizer, an evaluation at rank 0 that outlasts the timeout."""

import threading

import pytest
import torch

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import SAMPLES, loss_of, make_network, make_parts, numbered_data, of_the_mean_gradient, sgd, step, train
from paceline.core.records import WorkerLost

EXACT = 1e-12
LIMIT_S = 10.0


@pytest.mark.slow
def test_a_compiled_model_makes_the_same_updates():
    network, parts = make_network(), make_parts(make_network(), numbered_data())

    def compiled():
        model, optimizer, loader = parts()
        return torch.compile(model, backend="aot_eager"), optimizer, loader

    ranks = AttachedThreads(2, compiled, "bsp")
    steps = ranks.run(train(epochs=1))
    expected = of_the_mean_gradient(network, sgd, steps)
    for model, _, _ in ranks.parts:
        for ours, theirs in zip(model.parameters(), expected, strict=True):
            assert (ours - theirs).abs().max() < EXACT


@pytest.mark.parametrize(("is_of_the_model", "errors"), [(True, 2), (False, 0)])
def test_a_second_optimizer_may_not_step_the_attached_model(is_of_the_model, errors):
    def loop(run, model, optimizer):
        other = torch.nn.Linear(1, 1)
        second = torch.optim.Adam((model.last if is_of_the_model else other).parameters())
        for _ in run.epochs(1):
            for batch in run.loader:
                step(model, optimizer, [batch])
                second.step()

    answers = AttachedThreads(2, make_parts(make_network(), numbered_data()), "bsp").run(loop)
    found = [str(answer) for answer in answers if isinstance(answer, pl.UsageError)]
    assert len(found) == errors
    assert all("a second optimizer, Adam, steps parameters of the attached model" in each for each in found)


@pytest.mark.parametrize("protocol", ["bsp", "k_batch_async(k=2)"])
def test_the_others_go_on_during_a_long_evaluation_at_rank_0(protocol):
    went_on = threading.Event()

    def loop(run, model, optimizer):
        rank = next(rank for rank, parts in enumerate(ranks.parts) if parts[0] is model)
        losses = []
        for epoch in run.epochs(3):
            for x, y in run.loader:
                step(model, optimizer, [(x, y)])
                if rank == 1 and epoch == 1:
                    went_on.set()
            if rank == 0 and epoch == 0:
                assert went_on.wait(LIMIT_S)  # the evaluation lasts until then
                with torch.no_grad():
                    losses.append(float(loss_of(model, *data[:])))
        return losses

    data = numbered_data()
    ranks = AttachedThreads(3, make_parts(make_network(), data), protocol, worker_timeout_s=0.2)
    answers = ranks.run(loop)
    assert [len(losses) for losses in answers] == [1, 0, 0]
    history = ranks.server.result.history
    assert {each.worker for each in history.of(WorkerLost)} <= {0}
    assert history.totals.samples_used == 3 * SAMPLES
