"""Ends of attached loops without a server, as threads: ranks that leave, die, start again; resumed runs."""

import threading

import pytest
import torch

import paceline as pl
import rank_threads
from allreduce_loops import AllReduceLoops
from loop_parts import (
    adamw,
    check_equal_models,
    make_parts,
    step,
    train,
    values,
)
from paceline.core.records import WorkerLost
from paceline.recording.run_folder import SavedRun
from selections import parametrize_few

EXACT = 1e-12


@parametrize_few("protocol", ["all_reduce", "local_sgd(H=3)"], keep=1)
def test_all_ranks_may_leave_together_with_equal_models(protocol, network, data, tmp_path):
    def loop(run, model, optimizer):
        for epoch in run.epochs(10):
            for batch in run.loader:
                step(model, optimizer, [batch])
            if epoch == 1:
                break

    ranks = AllReduceLoops(2, make_parts(network, data), protocol, out=tmp_path / "run")
    assert ranks.run(loop) == [None, None]
    assert [run.stopped_by for run in ranks.runs] == ["stopped", "stopped"]
    check_equal_models(ranks)
    assert pl.replay(tmp_path / "run").is_same


def test_an_error_in_the_loop_of_one_rank_ends_the_run(network, data):
    def loop(run, model, optimizer):
        for _ in run.epochs(10):
            for batch in run.loader:
                step(model, optimizer, [batch])
                if run is ranks.runs[1]:
                    raise ValueError("of the user")
        return run.reason

    ranks = AllReduceLoops(3, make_parts(network, data), "all_reduce")
    first, second, third = ranks.run(loop)
    assert isinstance(second, ValueError)
    for other in (first, third):
        assert isinstance(other, pl.RunError)
        assert str(other) == "rank 0: worker 1 has left the run: ValueError: of the user"


@pytest.mark.slow
def test_elastic_ranks_continue_without_one_that_leaves_or_dies(network, data, tmp_path):
    def loop(run, model, optimizer):
        for epoch in run.epochs(4):
            for batch in run.loader:
                step(model, optimizer, [batch])
            if run is ranks.runs[1] and epoch == 1:
                return None
        return run.stopped_by

    faults = [pl.Fault(worker=2, draw=3, kind="die")]
    torchrun = {"min_workers": 1, "faults": faults, "heartbeat_timeout_s": 2.0}
    ranks = AllReduceLoops(4, make_parts(network, data), "all_reduce", torchrun, out=tmp_path / "run")
    first, second, third, fourth = ranks.run(loop)
    assert (first, second, fourth) == ("epochs", None, "epochs")
    assert isinstance(third, rank_threads.Killed)
    for ours, theirs in zip(values(ranks.parts[0][0]), values(ranks.parts[3][0]), strict=True):
        assert torch.equal(ours, theirs)
    assert {each.worker for each in SavedRun(tmp_path / "run").history.of(WorkerLost)} == {1, 2}


@pytest.mark.slow
def test_a_rank_that_is_started_again_takes_part(network, data):
    has_joined = threading.Event()

    def loop(run, model, optimizer):
        for _ in run.epochs(8):
            for batch in run.loader:
                if run is ranks.runs[0]:
                    has_joined.wait(0.05)
                step(model, optimizer, [batch])
        return run.stopped_by

    def leave(run, model, optimizer):
        next(run.epochs(8))
        step(model, optimizer, [next(iter(run.loader))])

    def loop_again(run, model, optimizer):
        next(run.epochs(8))
        next(iter(run.loader))
        has_joined.set()
        return loop(run, model, optimizer)

    ranks = AllReduceLoops(3, make_parts(network, data, adamw), "all_reduce", {"min_workers": 1})
    for rank, its_loop in enumerate([loop, loop, leave]):
        ranks.start(rank, its_loop)
    assert ranks.end(2) is None
    ranks.start(2, loop_again)
    assert [ranks.end(rank) for rank in range(3)] == ["epochs"] * 3
    check_equal_models(ranks)


def test_an_error_of_the_optimizer_ends_the_run(network, data):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no step")

    ranks = AllReduceLoops(2, make_parts(network, data, lambda model: Failing(model.parameters(), lr=0.1)), "s3gd")
    answers = ranks.run(train())
    assert any(isinstance(answer, ValueError) for answer in answers)
    assert all(isinstance(answer, ValueError | pl.RunError) for answer in answers)  # the other may end it first


def test_a_step_between_the_end_and_finish_names_run_over(network, data):
    def loop(run, model, optimizer):
        for _ in run.epochs(2):
            for batch in run.loader:
                step(model, optimizer, [batch])
            optimizer.step()

    for error in AllReduceLoops(2, make_parts(network, data), "all_reduce", stop="updates=2").run(loop):
        assert "check run.over before optimizer.step()" in str(error)


@pytest.mark.slow
@parametrize_few(("protocol", "steps"), [("all_reduce", 7), ("dc_s3gd", 8)], keep=1)  # the last gradient is not used
def test_a_recorded_run_is_resumed(protocol, steps, network, data, tmp_path):
    def loop(run, model, optimizer):
        return len([step(model, optimizer, [batch]) for _ in run.epochs(2) for batch in run.loader])

    folder = tmp_path / "run"
    parts = make_parts(network, data)
    whole = AllReduceLoops(2, parts, protocol)
    whole.run(loop)
    first = AllReduceLoops(2, parts, protocol, stop="updates=7", out=folder, checkpoint_every="updates=1")
    assert first.run(loop) == [steps, steps]
    second = AllReduceLoops(2, parts, protocol, stop="epochs=2", resume=folder)
    assert second.run(loop) == [5, 5]
    assert pl.replay(folder).is_same
    check_equal_models(second)
    if protocol == "all_reduce":
        for ours, theirs in zip(values(second.parts[1][0]), values(whole.parts[1][0]), strict=True):
            assert (ours - theirs).abs().max() < EXACT


def test_a_rank_that_dies_is_named_by_the_others(network, data):
    torchrun = {"faults": [pl.Fault(worker=1, draw=2, kind="die")], "heartbeat_timeout_s": 2.0}
    first, second, third = AllReduceLoops(3, make_parts(network, data), "all_reduce", torchrun).run(train())
    assert isinstance(second, rank_threads.Killed)
    for error in (first, third):
        assert isinstance(error, pl.RunError)
        assert "worker 1" in str(error)


def test_a_run_is_not_resumed_with_another_optimizer(network, data, tmp_path):
    folder = tmp_path / "run"
    AllReduceLoops(1, make_parts(network, data), "all_reduce", stop="updates=2", out=folder).run(train())
    [refused] = AllReduceLoops(1, make_parts(network, data, adamw), "all_reduce", resume=folder).run(train())
    assert isinstance(refused, pl.UsageError)
    assert "optimizer=AdamW" in str(refused)
