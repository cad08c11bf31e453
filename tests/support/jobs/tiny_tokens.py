"""Small language model with sequences of unequal length: a mean over tokens differs from one over samples."""

from math import exp

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from tiny_jobs import tiny_job

VOCABULARY, LENGTH = 7, 6
PADDING = -100


def sequences(samples):
    """Return inputs, and targets of different lengths >= 1."""
    draw = torch.Generator().manual_seed(samples)
    inputs = torch.randint(VOCABULARY, (samples, LENGTH), generator=draw)
    targets = (inputs + 1) % VOCABULARY
    for row, target in enumerate(targets):
        target[1 + row % LENGTH :] = PADDING
    return TensorDataset(inputs, targets)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.output = nn.Linear(4, VOCABULARY)
        self.double()

    def forward(self, inputs):
        return self.output(self.embedding(inputs))


def step(model, batch):
    inputs, target = batch
    each = F.cross_entropy(model(inputs).transpose(1, 2), target, reduction="none", ignore_index=PADDING)
    tokens = (target != PADDING).sum()
    by_sample = each.sum(1) / (target != PADDING).sum(1)
    return by_sample.mean(), {
        "by_sample": by_sample.mean(),
        "by_batch": pl.jobs.Average(by_sample.mean()),
        "nll": pl.jobs.Average(each.sum(), tokens),
        "perplexity": pl.jobs.Average(each.sum(), tokens, exp),
    }


def mean_over_tokens(model, batch):
    inputs, target = batch
    return F.cross_entropy(model(inputs).transpose(1, 2), target, ignore_index=PADDING)


def tokens_of(batch):
    return (batch[1] != PADDING).sum()


def token_job(samples=50, **changes):
    settings = {"model": Model, "loss": None, "step": step, "data": sequences(48), "eval_data": sequences(samples)}
    return tiny_job(**{**settings, "batch_size": 8, "name": "tokens", **changes})
