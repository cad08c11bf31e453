"""Attached loops, as threads: updates are those of the mean gradient, epochs are whole, the end is reported."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from attached_threads import AttachedThreads

SAMPLES, BATCH = 48, 4
EXACT = 1e-12


class Network(nn.Module):
    """Network with batch norm, a tied weight and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.last = nn.Linear(3, 1)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x):
        return self.frozen * self.last(torch.tanh(self.second(self.norm(self.first(x)))))


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 3, generator=generator).double(), torch.arange(SAMPLES).double()[:, None])


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return Network().double()


def sgd(model):
    matrices, vectors = ([each for each in model.parameters() if (each.ndim > 1) == large] for large in (True, False))
    groups = [{"params": matrices, "lr": 0.05}, {"params": vectors, "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def make_parts(network, data, make_optimizer=sgd, **loader):
    def parts():
        model = copy.deepcopy(network)
        return model, make_optimizer(model), DataLoader(data, **{"batch_size": BATCH, "shuffle": True, **loader})

    return parts


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        (mse_loss(model(x), y / SAMPLES) / len(batches)).backward()
    optimizer.step()


def train(epochs=2, accumulate=1):
    """Return a loop that returns the batches of each of its steps."""

    def loop(run, model, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        steps, batches = [], []
        for _ in run.epochs(epochs):
            for batch in run.loader:
                batches.append(batch)
                if len(batches) == accumulate:
                    step(model, optimizer, batches)
                    scheduler.step()
                    steps.append(batches)
                    batches = []
        assert run.over
        return steps

    return loop


def of_the_mean_gradient(network, make_optimizer, steps, clip_norm=None):
    """Return the parameters after steps by the mean of the ranks' gradients."""
    model = copy.deepcopy(network)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for of_ranks in zip(*steps, strict=True):
        optimizer.zero_grad()
        for batches in of_ranks:
            for x, y in batches:
                (mse_loss(model(x), y / SAMPLES) / len(batches) / len(of_ranks)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()
    return list(model.parameters())


def counted(steps):
    return Counter(int(number) for done in steps for batches in done for _, y in batches for number in y)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize(("accumulate", "clip_norm"), [(1, 0.01), (2, None)])
def test_bsp_steps_by_the_mean_gradient(make_optimizer, accumulate, clip_norm, network, data):
    parts = make_parts(network, data, make_optimizer, batch_size=BATCH // accumulate)
    ranks = AttachedThreads(3, parts, "bsp", accumulate=accumulate, clip_norm=clip_norm)
    steps = ranks.run(train(accumulate=accumulate))
    expected = of_the_mean_gradient(network, make_optimizer, steps, clip_norm)
    for model, _, _ in ranks.parts:
        for ours, theirs in zip(model.parameters(), expected, strict=True):
            assert (ours - theirs).abs().max() < EXACT
    assert counted(steps) == dict.fromkeys(range(SAMPLES), 2)


@pytest.mark.parametrize("protocol", ["k_sync(k=2)", "k_batch_async(k=3)", "asp", "dbw"])
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
    first = sum(mse_loss(model(x), y / SAMPLES).item() / 2 for x, y in steps[0])
    arrived = [each for each in ranks.server.result.history.of(pl.GradientArrived) if each.worker == 0]
    assert arrived[0].loss == pytest.approx(first, rel=1e-9)


def test_a_step_after_the_end_names_run_over(network, data):
    def loop(run, model, optimizer):
        train(epochs=1)(run, model, optimizer)
        optimizer.step()

    for error in AttachedThreads(2, make_parts(network, data), "bsp").run(loop):
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

    answers = AttachedThreads(2, make_parts(network, data), "bsp").run(loop)
    assert all("optimizer.step() was not called" in str(each) for each in answers)


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


def test_a_closure_is_refused(network, data):
    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for x, y in run.loader:
                optimizer.step(lambda: mse_loss(model(x), y))  # noqa: B023  # called at once

    for error in AttachedThreads(2, make_parts(network, data), "bsp").run(loop):
        assert "optimizer.step(closure)" in str(error)
