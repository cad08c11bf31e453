"""Network, data and loops for tests of attached runs."""

import copy

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from paceline.user_loop.data.loop_data import UserLoop

SAMPLES, BATCH = 48, 4


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


def numbered_data():
    """Return samples whose targets are their numbers."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 3, generator=generator).double(), torch.arange(SAMPLES).double()[:, None])


def make_network():
    torch.manual_seed(0)
    return Network().double()


def make_plain_network():
    """Return a network without layers that depend on the other samples of a batch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def loss_of(model, x, y):
    return mse_loss(model(x), y / SAMPLES)


def sgd(model):
    matrices, vectors = ([each for each in model.parameters() if (each.ndim > 1) == large] for large in (True, False))
    groups = [{"params": matrices, "lr": 0.05}, {"params": vectors, "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


class Derived(torch.optim.SGD):
    """Optimizer whose step calls that of its base class."""

    def step(self, closure=None):
        return super().step(closure)


def derived_sgd(model):
    sgd(model)  # from now on torch calls hooks in the step of the base class too
    return Derived(model.parameters(), lr=0.02, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def loop_of(model, optimizer, loader, accumulate=1, clip_norm=None):
    """Return the parts of a loop as attach gets them."""
    return UserLoop(model=model, optimizer=optimizer, loader=loader, accumulate=accumulate, clip_norm=clip_norm)


def make_parts(network, data, make_optimizer=sgd, **loader):
    def parts():
        model = copy.deepcopy(network)
        return model, make_optimizer(model), DataLoader(data, **{"batch_size": BATCH, "shuffle": True, **loader})

    return parts


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        (loss_of(model, x, y) / len(batches)).backward()
    optimizer.step()


def step_with_closure(model, optimizer, batches):
    def closure():
        optimizer.zero_grad()
        losses = [loss_of(model, x, y) / len(batches) for x, y in batches]
        for loss in losses:
            loss.backward()
        return sum(loss.item() for loss in losses)

    return optimizer.step(closure=closure)


def train(epochs=2, accumulate=1, step=step):
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
                (loss_of(model, x, y) / len(batches) / len(of_ranks)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()
    return list(model.parameters())


def values(model):
    """Return the parameters and buffers of a model."""
    return list(model.state_dict().values())


def check_equal_models(ranks):
    """Check that all ranks have equal parameters and buffers."""
    first, *others = [values(model) for model, _, _ in ranks.parts]
    for other in others:
        assert all(map(torch.equal, first, other))
