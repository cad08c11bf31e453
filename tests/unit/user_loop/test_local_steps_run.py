"""Attached loops with local steps, as threads: equal to `pl.train` with the same arrivals; state, refusals."""

import shutil
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from arrival_replay import noted_events
from attached_replay import job_of, trained_with
from attached_threads import AttachedThreads
from attached_turns import in_turns
from loop_parts import BATCH, SAMPLES, adamw, check_equal_models, derived_sgd, loss_of, make_parts, sgd, step, values
from paceline.core.records import GradientArrived, WorkInterrupted
from paceline.user_loop.data.loop_data import LoopJob
from selections import parametrize_each_once, parametrize_few

EXACT = 1e-12
EPOCHS = 2
STOP = f"epochs={EPOCHS}"
MINIBATCHES = EPOCHS * SAMPLES // BATCH


@pytest.fixture
def events(monkeypatch):
    return noted_events(monkeypatch)


def check_equal(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() < EXACT


def loop(run, model, optimizer):
    """Return the number of steps of the loop."""
    return sum(step(model, optimizer, [batch]) or 1 for _ in run.epochs(EPOCHS) for batch in run.loader)


@parametrize_each_once(
    make_optimizer__clip_norm=[(sgd, 0.01), (adamw, None), (derived_sgd, None)],
    protocol=[
        "bsp + local_steps(H=2, outer='nesterov(lr=0.7, momentum=0.5)')",
        "k_sync(k=2) + local_steps(H=3)",
        "asp + local_steps(H=5, outer='delayed_nesterov(lr=0.4, momentum=0.5, every=2)')",
        "k_batch_async(k=2) + staleness_weight + local_steps(seconds=0.005)",
    ],
)
def test_every_protocol_trains_as_a_job_does(protocol, make_optimizer, clip_norm, network, data, events):
    ranks = AttachedThreads(3, make_parts(network, data, make_optimizer), protocol, clip_norm=clip_norm)
    assert sum(ranks.run(loop)) >= MINIBATCHES
    expected = trained_with(events, job_of(network, data, make_optimizer, clip_norm=clip_norm), 3, protocol, STOP)
    check_equal(values(ranks.parts[0][0]), expected)
    check_equal_models(ranks)
    assert ranks.server.result.history.totals.samples_used == EPOCHS * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["bsp", "asp"])
def test_one_local_step_of_plain_sgd_is_the_protocol_without_it(protocol, network, data, events):
    def plain(model):
        return torch.optim.SGD(model.parameters(), lr=0.05)

    ranks = AttachedThreads(3, make_parts(network, data, plain), f"{protocol} + local_steps(H=1)")
    ranks.run(loop)
    check_equal(values(ranks.parts[0][0]), trained_with(events, job_of(network, data, plain), 3, protocol, STOP))


@pytest.mark.slow
def test_the_state_of_an_interrupted_work_is_discarded(network, data, events):
    def is_interrupted(run, _):
        return run._tasks.task.is_interrupted

    protocol = "k_sync(k=1) + local_steps(H=3)"
    ranks = AttachedThreads(2, make_parts(network, data), protocol)
    ranks.run(in_turns(ranks, EPOCHS, until_late=is_interrupted, held_at=4, until_first=is_interrupted))
    history = ranks.server.result.history
    assert 1 in {each.worker for each in history.of(WorkInterrupted)}
    assert 1 in {each.worker for each in history.of(GradientArrived) if each.used}
    check_equal(values(ranks.parts[0][0]), trained_with(events, job_of(network, data), 2, protocol, STOP))


@pytest.mark.slow
def test_the_state_of_a_dropped_work_is_discarded(network, data, events):
    protocol = "ringmaster(r=1) + local_steps(H=3, outer='sgd(lr=0.4)')"
    ranks = AttachedThreads(2, make_parts(network, data), protocol)
    loop_in_turns = in_turns(
        ranks,
        EPOCHS,
        until_late=lambda _, steps: steps[0] >= 9,
        held_at=10,
        until_first=lambda _, steps: steps[1] >= 6,
    )
    ranks.run(loop_in_turns)
    of_rank_1 = [each for each in ranks.server.result.history.of(GradientArrived) if each.worker == 1]
    assert [(each.used, each.reason) for each in of_rank_1[:2]] == [(False, "too stale"), (True, "")]
    check_equal(values(ranks.parts[0][0]), trained_with(events, job_of(network, data), 2, protocol, STOP))


@parametrize_few("protocol", ["bsp", "asp"], keep=1)
def test_a_scheduler_follows_the_workload_within_and_between_works(protocol, network, data, events):
    def scheduled(run, model, optimizer):
        scheduler = LambdaLR(optimizer, lambda at: 1 / (1 + at))
        run.set_scheduler(scheduler)
        for _ in run.epochs(EPOCHS):
            for batch in run.loader:
                step(model, optimizer, [batch])
                scheduler.step()

    protocol += " + local_steps(H=3)"
    ranks = AttachedThreads(2, make_parts(network, data), protocol)
    assert ranks.run(scheduled) == [None, None]
    rates = partial(LambdaLR, lr_lambda=lambda at: 1 / (1 + at))
    job = job_of(network, data, scheduler=rates, schedule_unit="update")
    check_equal(values(ranks.parts[0][0]), trained_with(events, job, 2, protocol, STOP))


@pytest.mark.slow
def test_each_rank_has_its_own_state_and_the_loop_keeps_its_groups(network, data):
    groups = [], []

    def holding(run, model, optimizer):
        rank = [parts[0] for parts in ranks.parts].index(model)
        groups[rank].extend(optimizer.param_groups)
        loop(run, model, optimizer)

    ranks = AttachedThreads(2, make_parts(network, data), "bsp + local_steps(H=2, outer=nesterov)")
    assert ranks.run(holding) == [None, None]
    first, second = (optimizer for _, optimizer, _ in ranks.parts)
    assert len(first.state) == len(second.state) == 6
    momenta = [next(iter(optimizer.state.values()))["momentum_buffer"] for optimizer in (first, second)]
    assert not torch.equal(*momenta)
    for optimizer, held in zip((first, second), groups, strict=True):
        assert all(ours is theirs for ours, theirs in zip(optimizer.param_groups, held, strict=True))
    for model, _, _ in ranks.parts:
        assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in model.parameters())


@pytest.mark.slow
def test_a_resumed_run_continues_with_the_state_of_the_optimizer_of_a_rank(network, data, tmp_path):
    def begun(epochs, folder):
        def loop_of(run, model, optimizer):
            for _ in run.epochs(epochs):
                for batch in run.loader:
                    step(model, optimizer, [batch])

        ranks = AttachedThreads(1, make_parts(network, data), "bsp + local_steps(H=3)", **{folder: tmp_path / "run"})
        assert ranks.run(loop_of) == [None]
        model, optimizer, _ = ranks.parts[0]
        return [*values(model), optimizer.state_dict()["state"][0]["momentum_buffer"]]

    whole = begun(2 * EPOCHS, "out")
    shutil.rmtree(tmp_path / "run")
    begun(EPOCHS, "out")
    check_equal(begun(2 * EPOCHS, "resume"), whole)


def test_a_state_cannot_be_loaded_during_the_run(network, data):
    def loading(run, model, optimizer):
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        for _ in run.epochs(1):
            for batch in run.loader:
                step(model, optimizer, [batch])
                optimizer.load_state_dict(saved)

    ranks = AttachedThreads(2, make_parts(network, data), "bsp + local_steps(H=2)")
    for error in ranks.run(loading):
        assert "load it before the first batch" in str(error)
    for _, optimizer, _ in ranks.parts:
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.slow
def test_the_loop_may_clip_the_gradient_of_each_local_step(network, data, events, caplog):
    def clipping(run, model, optimizer):
        for _ in run.epochs(EPOCHS):
            for x, y in run.loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                torch.nn.utils.clip_grad_norm_([each for each in model.parameters() if each.requires_grad], 0.01)
                optimizer.step()

    protocol = "bsp + local_steps(H=2)"
    ranks = AttachedThreads(2, make_parts(network, data), protocol)
    ranks.run(clipping)
    assert "clip_grad_norm_" not in caplog.text
    job = job_of(network, data, clip_norm=0.01)
    for ours, theirs in zip(values(ranks.parts[0][0]), trained_with(events, job, 2, protocol, STOP), strict=True):
        assert (ours - theirs).abs().max() < 1e-6  # torch adds 1e-6 to the norm


@pytest.mark.slow
def test_an_optimizer_of_another_library_steps_and_several_batches_make_a_step(network, data):
    class Counting(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
                parameter.data.sub_(parameter.grad, alpha=0.1)

    def make_optimizer(model):
        return Counting([each for each in model.parameters() if each.requires_grad])

    def accumulating(run, model, optimizer):
        batches = []
        for _ in run.epochs(EPOCHS):
            for batch in run.loader:
                batches.append(batch)
                if len(batches) == 2:
                    step(model, optimizer, batches)
                    batches = []

    parts = make_parts(network, data, make_optimizer, batch_size=BATCH // 2)
    ranks = AttachedThreads(2, parts, "bsp + local_steps(H=3)", accumulate=2)
    assert ranks.run(accumulating) == [None, None]
    for _, optimizer, _ in ranks.parts:
        assert {state["steps"] for state in optimizer.state.values()} == {MINIBATCHES // 2}


def test_the_minibatches_that_follow_in_a_work_are_loaded_ahead(network, data, monkeypatch):
    def noting(run, model, optimizer):
        seen = []
        for _ in run.epochs(1):
            for batch in run.loader:
                task = run._tasks.task
                seen.append([task.minibatch.number, *(each.number for each in task.upcoming)])
                step(model, optimizer, [batch])
        return seen

    monkeypatch.setattr(LoopJob, "minibatches_ahead", 2)
    [seen] = AttachedThreads(1, make_parts(network, data), "bsp + local_steps(H=4)").run(noting)
    assert seen[:8] == [[0, 1, 2], [1, 2, 3], [2, 3], [3], [4, 5, 6], [5, 6, 7], [6, 7], [7]]


def test_progress_counts_works_and_the_gradients_in_them(network, data):
    def noting(run, model, optimizer):
        seen = []
        for _ in run.epochs(1):
            for batch in run.loader:
                seen.append((run.update, run.workload, run.last.fate))
                step(model, optimizer, [batch])
        return [*seen, (run.update, run.workload)]

    ranks = AttachedThreads(2, make_parts(network, data), "bsp + local_steps(H=3)")
    assert ranks.run(noting) == [[*[(0, 0, "")] * 3, *[(1, 6, "used")] * 3, (2, 12)]] * 2


@pytest.mark.parametrize(
    ("protocol", "settings", "expected"),
    [
        ("bsp + local_steps(H=2)", {"lr_rule": "noise"}, "the workers step with the rate of the optimizer"),
        ("auto + local_steps(H=2)", {}, "sets the learning rate from the variance"),
        ("asp + dc_asgd(lambda0=1) + local_steps(H=2)", {}, "the sum of its steps"),
        ("bsp + local_steps(H=2)", {"stop": "loss=0.1"}, "stop loss=0.1 needs the loss"),
    ],
)
def test_what_needs_single_gradients_or_a_loss_is_refused(protocol, settings, expected, network, data):
    def without_loss(run, model, optimizer):
        for _ in run.epochs(1):
            for _ in run.loader:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()

    for error in AttachedThreads(1, make_parts(network, data), protocol, **settings).run(without_loss):
        assert expected in str(error)
