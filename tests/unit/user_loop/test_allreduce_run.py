"""Attached loops without a server, as threads: equal to DDP and to `pl.train`, every rank steps, ends are reported."""

import copy
import threading

import pytest
import torch
from safetensors.torch import load_file

import paceline as pl
import rank_threads
from allreduce_loops import AllReduceLoops
from allreduce_runs import ALGORITHMS
from loop_parts import (
    BATCH,
    SAMPLES,
    adamw,
    loss_of,
    make_network,
    make_parts,
    numbered_data,
    of_the_mean_gradient,
    sgd,
    step,
    train,
)
from paceline.core.records import WorkerLost
from paceline.recording.run_folder import SavedRun

EXACT = 1e-12


@pytest.fixture(scope="module")
def data():
    return numbered_data()


@pytest.fixture(scope="module")
def network():
    return make_network()


def values(model):
    return list(model.state_dict().values())


def check_equal_models(ranks):
    first, *others = [values(model) for model, _, _ in ranks.parts]
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize(("make_optimizer", "accumulate", "clip_norm"), [(sgd, 1, 0.01), (adamw, 2, None)])
def test_all_reduce_steps_by_the_mean_gradient(make_optimizer, accumulate, clip_norm, network, data):
    parts = make_parts(network, data, make_optimizer, batch_size=BATCH // accumulate)
    ranks = AllReduceLoops(3, parts, "all_reduce", accumulate=accumulate, clip_norm=clip_norm)
    steps = ranks.run(train(accumulate=accumulate))
    expected = of_the_mean_gradient(network, make_optimizer, steps, clip_norm)
    for model, _, _ in ranks.parts:
        for ours, theirs in zip(model.parameters(), expected, strict=True):
            assert (ours - theirs).abs().max() < EXACT
    check_equal_models(ranks)


@pytest.mark.parametrize("protocol", ALGORITHMS)
def test_every_protocol_trains_as_a_job_does(protocol, network, data):
    def loop(run, model, optimizer):
        for _ in run.epochs(2):
            for batch in run.loader:
                step(model, optimizer, [batch])

    ranks = AllReduceLoops(3, make_parts(network, data), protocol)
    ranks.run(loop)
    job = pl.Job(
        model=network,
        optimizer=lambda model: sgd(model),
        data=data,
        batch_size=BATCH,
        step=lambda model, batch: loss_of(model, *batch),
        sampling="epoch",
    )
    of_job = rank_threads.Job(3, job, protocol=protocol, stop="epochs=2")
    of_job.start_workers()
    result = of_job.serve()
    for ours, theirs in zip(values(ranks.parts[1][0]), result.parameters.values(), strict=True):
        assert (ours - theirs).abs().max() < EXACT


@pytest.mark.parametrize("protocol", ["all_reduce", "local_sgd(H=3)", "dc_s3gd"])
def test_a_rank_without_a_last_minibatch_ends_with_the_model_of_the_others(protocol, network, data, tmp_path):
    ranks = AllReduceLoops(5, make_parts(network, data), protocol, out=tmp_path / "run")
    steps = ranks.run(train())
    assert sorted(map(len, steps)) == [4, 5, 5, 5, 5]  # 24 minibatches
    check_equal_models(ranks)
    assert {(run.stopped_by, run.reason) for run in ranks.runs} == {("epochs", "2 epochs, 24 gradients, applied")}
    assert pl.replay(tmp_path / "run").is_same
    saved = load_file(tmp_path / "run/model.safetensors")
    trained = ranks.parts[4][0].state_dict()
    assert all(torch.equal(saved[name], trained[name]) for name in saved)


def test_the_loss_is_that_of_backward(network, data, tmp_path):
    ranks = AllReduceLoops(2, make_parts(network, data), "all_reduce", out=tmp_path / "run")
    [steps, _] = ranks.run(train(epochs=1))
    [[(x, y)], *_] = steps
    expected = loss_of(copy.deepcopy(network), x, y).item()
    arrived = [each for each in SavedRun(tmp_path / "run").history.of(pl.GradientArrived) if each.worker == 0]
    assert arrived[0].loss == pytest.approx(expected, rel=1e-9)


def test_dc_s3gd_returns_from_the_step_before_the_sum_has_ended(network, data):
    has_returned = threading.Event()

    def loop(run, model, optimizer):
        rank = ranks.runs.index(run)
        for _ in run.epochs(1):
            for batch in run.loader:
                if rank:
                    assert has_returned.wait(rank_threads.LIMIT_S)
                step(model, optimizer, [batch])
                if not rank:
                    has_returned.set()
        return "ended"

    ranks = AllReduceLoops(2, make_parts(network, data), "dc_s3gd")
    assert ranks.run(loop) == ["ended", "ended"]


class Counting(torch.optim.Optimizer):
    """Optimizer that is not of torch.optim, and counts its steps also if there are no gradients."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "steps": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"] / group["steps"])


@pytest.mark.parametrize("protocol", ["all_reduce", "local_sgd(H=3)", "dc_s3gd"])
def test_an_optimizer_of_another_library_makes_one_step_an_update(protocol, network, data):
    def make_optimizer(model):
        return Counting([each for each in model.parameters() if each.requires_grad])

    ranks = AllReduceLoops(3, make_parts(network, data, make_optimizer), protocol)
    assert [len(steps) for steps in ranks.run(train(epochs=1))] == [4, 4, 4]
    assert [optimizer.param_groups[0]["steps"] for _, optimizer, _ in ranks.parts] == [4, 4, 4]
    check_equal_models(ranks)


def test_all_ranks_begin_with_the_model_and_the_optimizer_of_rank_0(network, data):
    made = []

    def make_optimizer(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + len(made)), momentum=0.9)
        made.append(optimizer)
        if len(made) == 1:  # it has stepped before
            model(data.tensors[0]).sum().backward()
            optimizer.step()
        return optimizer

    ranks = AllReduceLoops(2, make_parts(network, data, make_optimizer), "all_reduce", stop="updates=1")
    ranks.run(train())
    check_equal_models(ranks)
    assert [optimizer.param_groups[0]["lr"] for optimizer in made] == [0.1, 0.1]


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("protocol", ["all_reduce", "dc_s3gd"])
def test_a_gradient_that_is_not_finite_is_left_out(protocol, everywhere, network, data):
    def loop(run, model, optimizer):
        for epoch in run.epochs(2):
            for i, (x, y) in enumerate(run.loader):
                bad = (epoch, i) == (0, 1) and (everywhere or run is ranks.runs[1])
                step(model, optimizer, [(x * float("inf") if bad else x, y)])
        return run.over

    ranks = AllReduceLoops(2, make_parts(network, data), protocol)
    assert ranks.run(loop) == [True, True]
    check_equal_models(ranks)
    assert all(parameter.isfinite().all() for parameter in ranks.parts[0][0].parameters())


def test_the_parameters_have_their_own_memory_after_the_run(network, data):
    ranks = AllReduceLoops(2, make_parts(network, data), "all_reduce")
    ranks.run(train(epochs=1))
    for model, _, _ in ranks.parts:
        for parameter in model.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes


@pytest.mark.parametrize("protocol", ["all_reduce", "local_sgd(H=3)"])
def test_all_ranks_may_leave_together_with_equal_models(protocol, network, data, tmp_path):
    def loop(run, model, optimizer):
        for epoch in run.epochs(10):
            for batch in run.loader:
                step(model, optimizer, [batch])
            if epoch == 1:
                break

    ranks = AllReduceLoops(2, make_parts(network, data), protocol, out=tmp_path / "run")
    assert ranks.run(loop) == [None, None]
    assert [run.stopped_by for run in ranks.runs] == ["interrupted", "interrupted"]
    check_equal_models(ranks)
    assert pl.replay(tmp_path / "run").is_same


def test_a_rank_that_leaves_alone_ends_the_run(network, data):
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
    assert first == third == "interrupted by the end of its loop at worker 1"


def test_elastic_ranks_continue_without_one_that_leaves_or_dies(network, data, tmp_path):
    def loop(run, model, optimizer):
        for epoch in run.epochs(4):
            for batch in run.loader:
                step(model, optimizer, [batch])
            if run is ranks.runs[1] and epoch == 1:
                return None
        return run.stopped_by

    faults = [pl.Fault(2, draw=3, kind="die")]
    torchrun = {"elastic": True, "faults": faults, "heartbeat_timeout_s": 2.0}
    ranks = AllReduceLoops(4, make_parts(network, data), "all_reduce", torchrun, out=tmp_path / "run")
    first, second, third, fourth = ranks.run(loop)
    assert (first, second, fourth) == ("epochs", None, "epochs")
    assert isinstance(third, rank_threads.Killed)
    for ours, theirs in zip(values(ranks.parts[0][0]), values(ranks.parts[3][0]), strict=True):
        assert torch.equal(ours, theirs)
    assert {each.worker for each in SavedRun(tmp_path / "run").history.of(WorkerLost)} == {1, 2}


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

    ranks = AllReduceLoops(3, make_parts(network, data, adamw), "all_reduce", {"elastic": True})
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
    assert all(isinstance(answer, ValueError) for answer in answers)


def test_a_step_after_the_end_names_run_over(network, data):
    def loop(run, model, optimizer):
        train(epochs=1)(run, model, optimizer)
        optimizer.step()

    for error in AllReduceLoops(2, make_parts(network, data), "all_reduce").run(loop):
        assert "check run.over before optimizer.step()" in str(error)


def test_every_sample_is_used_once_in_an_epoch(network, data):
    ranks = AllReduceLoops(3, make_parts(network, data), "local_sgd(H=2)")
    steps = ranks.run(train(epochs=1))
    numbers = sorted(int(number) for done in steps for batches in done for _, y in batches for number in y)
    assert numbers == [*range(SAMPLES)]


@pytest.mark.parametrize(("protocol", "steps"), [("all_reduce", 7), ("dc_s3gd", 8)])  # the last gradient is not used
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


def test_all_reduce_steps_with_the_learning_rates_of_rank_0(network, data):
    def loop(run, model, optimizer):
        for epoch in run.epochs(2):
            for batch in run.loader:
                step(model, optimizer, [batch])
            if epoch == 0 and run is ranks.runs[0]:
                optimizer.param_groups[1]["lr"] = 0.5
        return [group["lr"] for group in optimizer.param_groups]

    ranks = AllReduceLoops(3, make_parts(network, data), "all_reduce")
    assert ranks.run(loop) == [[0.05, 0.5]] * 3
    check_equal_models(ranks)


@pytest.mark.parametrize("protocol", ["all_reduce", "dc_s3gd"])
def test_gradients_may_be_set_to_zero_in_place(protocol, network, data):
    def trained(to_none):
        def loop(run, model, optimizer):
            for _ in run.epochs(2):
                for x, y in run.loader:
                    optimizer.zero_grad(set_to_none=to_none)
                    loss_of(model, x, y).backward()
                    optimizer.step()

        ranks = AllReduceLoops(2, make_parts(network, data), protocol)
        ranks.run(loop)
        return values(ranks.parts[0][0])

    assert all(map(torch.equal, trained(to_none=True), trained(to_none=False)))


def test_the_gradient_of_the_step_is_left_in_the_parameters(network, data):
    norms = {}

    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for batch in run.loader:
                step(model, optimizer, [batch])
                if not run.over:
                    norms.setdefault(run, []).append(float(model.last.weight.grad.norm()))

    AllReduceLoops(2, make_parts(network, data), "all_reduce").run(loop)
    first, second = norms.values()
    assert len(first) > 1
    assert first == second


def test_a_rank_that_dies_is_named_by_the_others(network, data):
    torchrun = {"faults": [pl.Fault(1, draw=2, kind="die")], "heartbeat_timeout_s": 2.0}
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
