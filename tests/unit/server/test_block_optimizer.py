"""Steps of optimizers on blocks: the bits of the optimizer's own steps."""

from functools import partial
from math import inf

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from loaded_loops import use_loops
from paceline.core.events import Accept, Apply
from paceline.server import kernels
from paceline.server.block_optimizer import BlockOptimizer
from paceline.server.optimizer_rules import AdamRule, SGDRule
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.blocks import BLOCK
from paceline.tensors.flat_buffers import FlatLayout
from paceline.worker.torch_utils import build_model
from selections import each_value_once, parametrize_few
from tiny_jobs import tiny_job

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


def decayed_apart(parameters):
    """Return an optimizer with weight decay for matrices only, and another rate for the last layer."""
    *others, weight, bias = parameters
    groups = [
        {"params": [each for each in others if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in others if each.ndim == 1]},
        {"params": [weight, bias], "lr": 0.01},
    ]
    return ADAMW(groups, lr=0.1, weight_decay=0.0)


BY_BLOCKS = {
    "sgd": partial(SGD, lr=0.1),
    "weight decay": partial(SGD, lr=0.1, weight_decay=0.01),
    "momentum": MOMENTUM,
    "dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(ADAM, lr=0.01),
    "adam with weight decay": partial(ADAM, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95)),
    "adamw": partial(ADAMW, lr=0.01),
    "groups": decayed_apart,
    "some parameters": lambda parameters: MOMENTUM(list(parameters)[1:3]),
}
BY_THEMSELVES = {
    "maximize": partial(SGD, lr=0.1, maximize=True),
    "foreach": partial(SGD, lr=0.1, foreach=True),
    "fused": partial(ADAMW, lr=0.1, fused=True),
    "amsgrad": partial(ADAM, lr=0.1, amsgrad=True),
    "rate in a tensor": partial(SGD, lr=torch.tensor(0.1)),
    "another optimizer": partial(torch.optim.RMSprop, lr=0.1),
    "subclass": type("Own", (SGD,), {}),
}


def wide_net():
    """Return a model with more than one block of parameters, of two dtypes, and buffers of three."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(530, 250), nn.BatchNorm1d(250), nn.Linear(250, 3).double())
    model.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
    return model


def server_of(optimizer, **settings):
    job = tiny_job(model=wide_net, optimizer=optimizer, **settings)
    model = build_model(job, 0)
    return ParameterServer(job, model, FlatLayout(model), per_epoch=10)


def update_of(number, k, **more):
    return Apply(
        version=number,
        gradients=tuple(Accept(worker=worker, draw=number, staleness=0, samples=8) for worker in range(k)),
        lr_scale=1.0,
        reason="",
        **more,
    )


def gradients_of(layout, seed, k):
    rng = torch.Generator().manual_seed(seed)
    made = [layout.allocate() for _ in range(k)]
    for each in made:
        for flat in [*each.flat_parameters, *each.flat_buffers]:
            flat.copy_(torch.randn(flat.shape, generator=rng).mul_(3))
    return made


def updated(server, number, k=3, accumulated=0, scale=1.0, **more):
    """Make an update of random gradients, of which some are accumulated as they arrive; return its step.

    Updates with an even number write a new version, and the others are in place.
    """
    layout, before = FlatLayout(server.model), server.state
    old = before.memory.clone()
    for i, gradient in enumerate(gradients_of(layout, number, k)):
        server.enqueue(gradient, weight=8 + i, step_scale=scale)
        if i < accumulated:
            server.accumulate()
    version = layout.allocate() if number % 2 == 0 else None
    step = server.apply(update_of(number, k, step_scale=scale, **more), version)
    assert server.state is (version or before)
    assert torch.equal(before.memory, old) is (version is not None)
    for ours, view in zip(server.model.parameters(), server.state.parameters, strict=True):
        assert ours.data_ptr() == view.data_ptr()
    for ours, view in zip(server.model.buffers(), server.state.buffers, strict=True):
        assert ours.data_ptr() == view.data_ptr()
    return step


def by_blocks(monkeypatch):
    """Return a list that gets the answer of each step on blocks: whether it was made."""
    made, own = [], BlockOptimizer.step

    def step(*arguments):
        check = own(*arguments)
        made.append(check is not None)
        return check

    monkeypatch.setattr(BlockOptimizer, "step", step)
    return made


def never(*arguments):
    return None


def states_of(server):
    optimizer = server.optimizer.state_dict()["state"]
    return {(i, name): torch.as_tensor(value) for i, state in optimizer.items() for name, value in state.items()}


def assert_equal(ours, theirs):
    assert torch.equal(ours.state.memory, theirs.state.memory)
    assert states_of(ours).keys() == states_of(theirs).keys()
    assert all(torch.equal(value, states_of(theirs)[key]) for key, value in states_of(ours).items())


CASES = {
    "queued": [{} for _ in range(4)],
    "one gradient": [{"k": 1} for _ in range(4)],
    "accumulated": [{"accumulated": i} for i in (0, 1, 2, 3)],
    "scaled": [{"k": 3, "scale": 0.3} for _ in range(4)],
    "measured": [{"measure": i % 2 == 0, "k": 1 + i} for i in range(4)],
    "limited": [{"momentum_limit": limit} for limit in (inf, 0.5, 0.0, 0.7, inf)],
}


@pytest.fixture(params=["torch", "loops"])
def arithmetic(request, monkeypatch):
    """Step blocks with torch, or also short ranges with the compiled loops."""
    if request.param == "loops":
        pytest.importorskip("numba")
        use_loops(monkeypatch)
        for kind in (SGDRule, AdamRule):
            for dtype in (torch.float32, torch.float64):
                assert kernels.exact_loops(kind, dtype) is not None
    else:
        monkeypatch.setattr(kernels, "exact_loops", lambda kind, dtype: None)


@pytest.mark.usefixtures("arithmetic")
@parametrize_few(("case", "optimizer"), each_value_once(list(CASES), list(BY_BLOCKS)), keep=1)
def test_steps_on_blocks_have_the_bits_of_the_optimizer(optimizer, case, monkeypatch):
    updates, is_clipped = CASES[case], ([*CASES].index(case) // 2 + [*BY_BLOCKS].index(optimizer)) % 2
    settings = {"optimizer": BY_BLOCKS[optimizer], "clip_norm": 2.0 if is_clipped else None}
    ours, theirs = (server_of(**settings) for _ in range(2))
    assert len(ours.state.flat_parameters[0]) > BLOCK
    made = by_blocks(monkeypatch)
    measured = [updated(ours, number, **each) for number, each in enumerate(updates)]
    assert made == [False] + [True] * (len(updates) - 1)
    monkeypatch.setattr(BlockOptimizer, "step", never)
    assert [updated(theirs, number, **each) for number, each in enumerate(updates)] == measured
    assert_equal(ours, theirs)


@pytest.mark.parametrize("optimizer", BY_THEMSELVES.values(), ids=BY_THEMSELVES)
def test_other_optimizers_step_by_themselves(optimizer, monkeypatch):
    server = server_of(optimizer)
    made = by_blocks(monkeypatch)
    for number in range(3):
        updated(server, number)
    assert made == [False] * 3


def test_hooks_of_a_step_are_called(monkeypatch):
    server, called = server_of(MOMENTUM), []
    made = by_blocks(monkeypatch)
    updated(server, 0)
    updated(server, 1)
    handle = server.optimizer.register_step_post_hook(lambda *arguments: called.append(arguments))
    updated(server, 2)
    handle.remove()
    updated(server, 3)
    assert made == [False, True, False, True]
    assert len(called) == 1


def test_a_step_that_was_replaced_is_called(monkeypatch):
    server, called = server_of(MOMENTUM), []
    made = by_blocks(monkeypatch)
    updated(server, 0)
    server.optimizer.step = lambda: called.append(1)
    updated(server, 1)
    assert made == [False, False]
    assert called == [1]


@pytest.mark.filterwarnings("error")
def test_a_scheduler_sees_a_step_before_its_own(monkeypatch):
    schedule = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
    server = server_of(MOMENTUM, scheduler=schedule, schedule_unit="gradient")
    made = by_blocks(monkeypatch)
    for number in range(3):
        updated(server, number, k=1)
    assert made == [False, True, True]
    assert server.learning_rate == 0.1 / 8


@parametrize_few("optimizer", [MOMENTUM, partial(ADAMW, lr=0.01)], keep=1)
def test_a_loaded_state_is_continued_on_blocks(optimizer, monkeypatch):
    ours, saved, theirs = (server_of(optimizer) for _ in range(3))
    for number in range(2):
        updated(saved, number)
        updated(ours, 7 + number)
    ours.load_state_dict(saved.state_dict())
    made = by_blocks(monkeypatch)
    updated(ours, 2)
    updated(ours, 3)
    assert made == [True, True]
    monkeypatch.setattr(BlockOptimizer, "step", never)
    for number in range(4):
        updated(theirs, number)
    assert_equal(ours, theirs)


def test_a_clipped_gradient_of_a_worker_is_not_written_to():
    server = server_of(MOMENTUM, clip_norm=0.5)
    layout = FlatLayout(server.model)
    for number in range(3):
        [gradient] = gradients_of(layout, number, 1)
        before = gradient.memory.clone()
        server.enqueue(gradient, weight=8)
        server.apply(update_of(number, 1), layout.allocate())
    assert torch.equal(gradient.memory, before)


def test_parameters_without_an_optimizer_are_in_the_version():
    server = server_of(BY_BLOCKS["some parameters"])
    before = server.state.parameters[0].clone()
    for number in range(3):
        updated(server, number)
    assert torch.equal(server.state.parameters[0], before)


@pytest.mark.parametrize("kind", [ADAM, ADAMW])
def test_groups_of_torch_before_2_6_have_no_option_for_the_decay(kind):
    [group] = kind([torch.zeros(1)], weight_decay=0.1).param_groups
    older = {name: value for name, value in group.items() if name != "decoupled_weight_decay"}
    is_adamw = kind is ADAMW
    assert AdamRule.of(older, 1.0, is_adamw=is_adamw) == AdamRule.of(group, 1.0, is_adamw=is_adamw)
    assert AdamRule.of(older, 1.0, is_adamw=is_adamw).is_decoupled is is_adamw
