"""Ends of attached runs, as threads: a failure or an interrupt is no normal end of a loop, on any rank."""

import pytest
import torch

import paceline as pl
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import make_parts, step, train
from selections import parametrize_few

KINDS = pytest.mark.parametrize(("kind", "protocol"), [(AttachedThreads, "bsp"), (AllReduceLoops, "all_reduce")])


def overflowing(run, model, optimizer):
    for _ in run.epochs(5):
        for x, y in run.loader:
            step(model, optimizer, [(x * torch.inf, y)])
    return run.stopped_by


@KINDS
def test_a_run_that_diverges_is_an_error_on_every_rank(kind, protocol, network, data):
    for error in kind(2, make_parts(network, data), protocol).run(overflowing):
        assert isinstance(error, pl.RunError)
        assert "not finite" in str(error)


@KINDS
def test_a_loop_may_ask_for_the_end_of_a_run_that_diverges(kind, protocol, network, data):
    assert kind(2, make_parts(network, data), protocol, returns=True).run(overflowing) == ["not_finite"] * 2


def test_a_stop_at_rank_0_is_a_normal_end_of_every_loop(network, data):
    def loop(run, model, optimizer):
        for _ in run.epochs(5):
            for batch in run.loader:
                step(model, optimizer, [batch])
                if model is ranks.parts[0][0]:
                    run.stop()
        return run.stopped_by, run.reason

    ranks = AttachedThreads(2, make_parts(network, data), "bsp")
    assert ranks.run(loop) == [("stopped", "run.stop() at rank 0")] * 2


@parametrize_few(
    ("error", "expected", "text"),
    [
        (ValueError("of the user"), pl.RunError, "the coordinator: rank 0 has left the run: ValueError: of the user"),
        (KeyboardInterrupt(), SystemExit, "130"),
    ],
    keep=1,
)
def test_an_error_in_the_loop_of_rank_0_is_one_on_the_others(error, expected, text, network, data, tmp_path, caplog):
    def loop(run, model, optimizer):
        for _ in run.epochs(5):
            for batch in run.loader:
                step(model, optimizer, [batch])
                if model is ranks.parts[0][0]:
                    raise error

    ranks = AttachedThreads(2, make_parts(network, data), "bsp", out=tmp_path / "run")
    first, second = ranks.run(loop)
    assert first is error
    assert isinstance(second, expected)
    assert str(second) == text
    if expected is SystemExit:
        assert caplog.text.count(f"resume it with resume='{tmp_path / 'run'}' in place of out=") == 1


def test_rank_0_learns_of_a_failure_after_its_loop(network, data):
    def loop(run, model, optimizer):
        if model is ranks.parts[1][0]:
            return overflowing(run, model, optimizer)
        for batch in run.loader:
            step(model, optimizer, [batch])
            break
        return None

    ranks = AttachedThreads(2, make_parts(network, data), "bsp", stop="epochs=5")
    for error in ranks.run(loop):
        assert isinstance(error, pl.RunError)
        assert "not finite" in str(error)


def test_a_run_that_reaches_its_end_raises_nothing(network, data):
    ranks = AttachedThreads(2, make_parts(network, data), "bsp", stop="updates=3")
    assert [len(steps) for steps in ranks.run(train(epochs=5))] == [3, 3]
