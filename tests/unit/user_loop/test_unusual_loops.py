"""Unusual loops: a compiled model, a second optimizer, an evaluation at rank 0 that outlasts the timeout."""

import threading
from contextlib import suppress

import pytest
import torch

import paceline as pl
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import SAMPLES, loss_of, make_network, make_parts, numbered_data, of_the_mean_gradient, sgd, step, train
from machine_speed import scaled
from paceline.core.records import WorkerJoined, WorkerLost
from selections import parametrize_each_once, parametrize_few

EXACT = 1e-12
LIMIT_S = scaled(10.0)


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


PROTOCOLS = [("bsp", AttachedThreads), ("bsp + local_steps(H=2)", AttachedThreads), ("all_reduce", AllReduceLoops)]


@parametrize_each_once(
    protocol__kind=PROTOCOLS,
    parameters_of__errors__warnings=[
        (lambda model: model.last.parameters(), 2, 0),
        (lambda model: torch.nn.Linear(1, 1).parameters(), 0, 2),
        (lambda model: [torch.zeros(1, requires_grad=True)], 0, 0),  # an input that the loop changes
    ],
)
def test_a_second_optimizer_may_not_step_the_attached_model(parameters_of, errors, warnings, protocol, kind, caplog):
    def loop(run, model, optimizer):
        second = [torch.optim.Adam(parameters_of(model)) for _ in range(2)]
        for _ in run.epochs(1):
            for number, batch in enumerate(run.loader):
                step(model, optimizer, [batch])
                if number == 0:
                    both.wait(LIMIT_S)  # else the error of rank 0 ends the run before the other's first batch
                for each in second:
                    each.step()

    both = threading.Barrier(2)
    answers = kind(2, make_parts(make_network(), numbered_data()), protocol).run(loop)
    found = [str(answer) for answer in answers if isinstance(answer, pl.UsageError)]
    assert len(found) == errors
    assert all("a second optimizer, Adam, steps parameters of the attached model" in each for each in found)
    said = [each for each in caplog.messages if "on each rank alone: the ranks diverge" in each]
    assert len(said) == warnings  # one of each rank


@parametrize_few(("protocol", "kind"), PROTOCOLS, keep=1)
def test_a_step_whose_error_is_caught_ends_the_loop(protocol, kind):
    def fail(*_):
        raise ValueError

    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for number, batch in enumerate(run.loader):
                hook = optimizer.register_step_pre_hook(fail) if number == 1 else None
                with suppress(ValueError):
                    step(model, optimizer, [batch])
                if hook is not None:
                    hook.remove()

    errors = kind(2, make_parts(make_network(), numbered_data()), protocol).run(loop)
    assert any("let the error end the loop" in str(error) for error in errors)
    assert all(isinstance(error, pl.RunError) for error in errors)


@pytest.mark.slow
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
    ranks = AttachedThreads(3, make_parts(make_network(), data), protocol, worker_timeout_s=1.0)
    answers = ranks.run(loop)
    assert [len(losses) for losses in answers] == [1, 0, 0]
    history = ranks.server.result.history
    assert {each.worker for each in history.of(WorkerLost)} <= {0}
    assert history.totals.samples_used == 3 * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["bsp", "k_batch_async(k=2)", "asp"])
def test_the_others_go_on_during_a_pause_and_the_rank_takes_part_again(protocol):
    went_on, is_back = threading.Event(), threading.Event()

    def loop(run, model, optimizer):
        rank = next(rank for rank, parts in enumerate(ranks.parts) if parts[0] is model)
        steps = 0
        for _ in run.epochs(3):
            for batch in run.loader:
                step(model, optimizer, [batch])
                steps += 1
                if rank == 0 and steps == 2:
                    with run.pause(), torch.no_grad():  # other values for an evaluation, while updates are made
                        own = [each.clone() for each in model.parameters()]
                        for each in model.parameters():
                            each.zero_()
                        assert went_on.wait(LIMIT_S)
                        for each, value in zip(model.parameters(), own, strict=True):
                            each.copy_(value)
                    is_back.set()
                if rank == 1 and steps == 6:
                    went_on.set()
                    assert is_back.wait(LIMIT_S)
        return steps

    ranks = AttachedThreads(2, make_parts(make_network(), numbered_data()), protocol)
    steps = ranks.run(loop)
    history = ranks.server.result.history
    assert [(each.worker, each.reason) for each in history.of(WorkerLost)] == [(0, "a pause of its loop")]
    assert [each.worker for each in history.of(WorkerJoined)] == [0]
    assert steps[0] > 2
    assert history.totals.samples_used == 3 * SAMPLES


def test_a_pause_between_a_batch_and_its_step_is_refused():
    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for _ in run.loader:
                with run.pause():
                    pass

    for error in AttachedThreads(2, make_parts(make_network(), numbered_data()), "bsp").run(loop):
        assert "pause after the step" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["bsp", "k_batch_async(k=2)", "ssp(lead=1)"])
def test_all_ranks_may_pause_at_the_same_time(protocol):
    all_pause = threading.Barrier(2, timeout=LIMIT_S)

    def loop(run, model, optimizer):
        for epoch in run.epochs(3):
            for batch in run.loader:
                step(model, optimizer, [batch])
            if epoch < 2:
                with run.pause():
                    all_pause.wait()

    ranks = AttachedThreads(2, make_parts(make_network(), numbered_data()), protocol)
    assert ranks.run(loop) == [None, None]
    assert ranks.server.result.stopped_by == "epochs"
    assert ranks.server.result.history.totals.samples_used == 3 * SAMPLES


def test_a_step_within_a_pause_is_refused():
    def loop(run, model, optimizer):
        for _ in run.epochs(2):
            for batch in run.loader:
                step(model, optimizer, [batch])
            if not run.over:
                with run.pause():
                    optimizer.step()

    for error in AttachedThreads(2, make_parts(make_network(), numbered_data()), "bsp").run(loop):
        assert "optimizer.step() without a batch of the run: iterate over run.loader" in str(error)
