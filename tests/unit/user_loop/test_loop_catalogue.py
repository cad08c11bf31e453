"""What users do in loops, as one table: each is equal to the plain loop, or refused with what to type.

The ranks draw the same batches, so that the mean gradient is that of each of them.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import paceline as pl
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from selections import each_value_once, parametrize_few

EXACT, RANKS, STEPS, BATCH = 1e-12, 2, 5, 8
SINGLE = 1e-6  # of what is computed in float32


def batch(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, 6, generator=generator).double()
    return x, x[:, :1] - x[:, 1:2]


def network():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def sgd(model):
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def step(model, optimizer, number):
    x, y = batch(number)
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()


class Row(NamedTuple):
    """Something that a loop does.

    Attributes:
        make: makes the model.
        step: makes a step, given the model, the optimizer and its number.
        optimizer: makes the optimizer.
        refused: what the refusal says; empty for equal parameters.
        exact: largest difference from the plain loop.
        accumulate: backward passes of a step.
    """

    make: Callable = network
    step: Callable = step
    optimizer: Callable = sgd
    refused: str = ""
    exact: float = EXACT
    accumulate: int = 1


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return self[2](checkpoint(nn.Sequential(self[0], self[1]), x, use_reentrant=False))


class Images(nn.Module):
    """Convolutions in channels_last."""

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 1)]
        self.layers = nn.Sequential(*layers).double().to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.layers(x.view(-1, 2, 1, 3).expand(-1, -1, 2, -1).contiguous(memory_format=torch.channels_last))


class Embedded(nn.Module):
    """Embedding of the signs of the input."""

    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(2, 3, **options).double()
        self.last = nn.Linear(18, 1).double()

    def forward(self, x):
        return self.last(self.table((x > 0).long()).flatten(1))


class Mixed(nn.Module):
    """Parameters of float64 beside those of float32."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.last = nn.Linear(4, 1).double()

    def forward(self, x):
        return self.last(self.first(x.float()).double())


class Spectrum(nn.Module):
    """Complex parameters, and a buffer of whole numbers that counts the calls."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(4, dtype=torch.complex128))
        self.last = nn.Linear(6, 1).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))


class Tiny(nn.Module):
    """Many tiny parameters."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((1,), 0.1).double()) for _ in range(500))

    def forward(self, x):
        return x[:, :1] * torch.cat(list(self.parts)).sum()


class Branches(nn.Module):
    """Layers of which each call uses one."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(6, 1).double() for _ in range(2))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.ways[self.calls % 2](x)


class Adapted(nn.Module):
    """Frozen layer with a trained part of low rank."""

    def __init__(self):
        super().__init__()
        self.base = network().requires_grad_(False)
        self.down, self.up = (nn.Linear(*shape, bias=False).double() for shape in ((6, 2), (2, 1)))

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def tied():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1)).double()
    model[2].weight = model[0].weight
    return model


def penalized(model, optimizer, number):
    x, y = batch(number)
    x.requires_grad_()
    optimizer.zero_grad()
    out = model(x)
    [slope] = torch.autograd.grad(out.sum(), x, create_graph=True)
    (mse_loss(out, y) + 0.1 * slope.square().mean()).backward()
    optimizer.step()


def two_losses(model, optimizer, number):
    x, y = batch(number)
    optimizer.zero_grad(set_to_none=False)
    mse_loss(model(x), y).backward()
    (0.1 * model(-x).square().mean()).backward()
    optimizer.step()


def halves(model, optimizer, number):
    x, y = batch(number)
    optimizer.zero_grad()
    for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
        (mse_loss(model(x[half]), y[half]) / 2).backward()
    optimizer.step()


def with_closure(model, optimizer, number):
    x, y = batch(number)

    def closure():
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0


def evaluated(model, optimizer, number):
    step(model, optimizer, number)
    model.eval()
    with torch.no_grad():
        model(batch(number + 100)[0])
    model.train()


def scheduled_by_hand(model, optimizer, number):
    for group in optimizer.param_groups:
        group["lr"] = 0.05 / (1 + number)
        group["weight_decay"] = 0.01 * number
    step(model, optimizer, number)


def under_autocast(model, optimizer, number):
    x, y = batch(number)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x.float())
    mse_loss(out.float(), y.float()).backward()
    optimizer.step()


def hooked():
    model = network()
    model[0].weight.register_hook(lambda gradient: 0.5 * gradient)
    model[2].register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))
    return model


def clamped(model, optimizer, number):
    step(model, optimizer, number)
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)


def thawing(model, optimizer, number):
    model.base[0].requires_grad_(number > 1)
    step(model, optimizer, number)


def growing(model, optimizer, number):
    if number == 2:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1).double())]})
    step(model, optimizer, number)


def adamw(**options):
    return lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, **options)


WRITTEN = "the loop or a forward pass has written to"
ROWS = {
    "plain": Row(),
    "activation checkpointing": Row(make=lambda: Checkpointed(*network())),
    "channels_last": Row(make=Images),
    "tied weights": Row(make=tied),
    "embedding": Row(make=Embedded),
    "many tiny parameters": Row(make=Tiny),
    "float64 beside float32": Row(make=Mixed, exact=SINGLE),
    "complex parameters, a buffer of whole numbers": Row(make=Spectrum),
    "a branch in each call": Row(make=Branches),
    "frozen base with adapters": Row(make=Adapted),
    "gradient penalty": Row(step=penalized),
    "two backward calls": Row(step=two_losses),
    "accumulation": Row(step=halves, accumulate=2),
    "closure": Row(step=with_closure),
    "evaluation": Row(step=evaluated),
    "own schedule": Row(step=scheduled_by_hand),
    "autocast": Row(make=lambda: network().float(), step=under_autocast, exact=SINGLE),
    "own hooks": Row(make=hooked),
    "AdamW": Row(optimizer=adamw()),
    "foreach": Row(optimizer=adamw(foreach=True)),
    "fused": Row(optimizer=adamw(fused=True)),
    "amsgrad": Row(optimizer=adamw(amsgrad=True)),
    "max_norm": Row(make=lambda: Embedded(max_norm=0.5), refused=WRITTEN),
    "sparse gradients": Row(make=lambda: Embedded(sparse=True)),
    "clamping": Row(step=clamped, refused=WRITTEN),
    "unfreezing": Row(make=Adapted, step=thawing, refused="the model trains base.0"),
    "another parameter group": Row(step=growing, refused="parameter group 1 of the optimizer has other parameters"),
}
WAYS = [("bsp", AttachedThreads, {}), ("bsp", AttachedThreads, {"server": False}), ("all_reduce", AllReduceLoops, {})]


def made(row):
    torch.manual_seed(0)
    model = row.make()
    return model, row.optimizer(model)


@parametrize_few(("name", "way"), each_value_once(list(ROWS), WAYS), keep=30)
def test_a_loop_is_equal_to_the_plain_one_or_refused(name, way):
    row, (protocol, kind, settings) = ROWS[name], way

    def loop(run, model, optimizer):
        for number in run.steps(STEPS):
            row.step(model, optimizer, number)

    ranks = kind(RANKS, lambda: (*made(row), None), protocol, accumulate=row.accumulate, **settings)
    answers = ranks.run(loop)
    if row.refused and (protocol != "all_reduce" or row.refused != WRITTEN):  # each rank steps its own parameters there
        assert any(isinstance(each, pl.PacelineError) and row.refused in str(each) for each in answers), answers
        return
    assert answers == [None] * RANKS
    alone, optimizer = made(row)
    alone = copy.copy(alone)
    for number in range(STEPS):
        row.step(alone, optimizer, number)
    for model, _, _ in ranks.parts:
        for ours, theirs in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
            assert (ours - theirs).abs().max() <= row.exact
