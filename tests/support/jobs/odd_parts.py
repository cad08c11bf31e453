"""Optimizers of every kind, and a model with parameters of every kind."""

from functools import partial

import torch
from torch import nn

from tiny_jobs import sgd

OPTIMIZERS = {
    "sgd": sgd(),
    "momentum": sgd(momentum=0.9),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


class Odd(nn.Module):
    """Model with a frozen, a tied and an unused layer and two dtypes."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(5, 5).double().requires_grad_(False)
        self.first = nn.Linear(5, 5).double()
        self.tied = nn.Linear(5, 5).double()
        self.tied.weight = self.first.weight
        self.last = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.seen[self.calls.item() % 3] = True
        return self.last(self.tied(torch.tanh(self.first(self.frozen(x)))).float())
