"""Counting job whose model has two tensors, so that it can have two shards."""

from functools import partial

import torch
from torch import nn

import paceline as pl
from tiny_counting import counting_job


class Halves(nn.Module):
    """Model that counts samples in two tensors, each of which is a shard."""

    def __init__(self, samples):
        super().__init__()
        self.halves = nn.ParameterList(torch.zeros(samples // 2, dtype=torch.float64) for _ in range(2))

    @property
    def count(self):
        return torch.cat(list(self.halves))

    def forward(self, index):
        return self.count[index]


def halves_job(samples, **settings):
    job = counting_job(samples, **settings)
    return pl.Job(
        **{**{name: getattr(job, name) for name in job.__dataclass_fields__}, "model": partial(Halves, samples)}
    )
