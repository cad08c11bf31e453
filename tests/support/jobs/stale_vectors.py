"""Flat vectors for tests of compensation."""

import torch

import paceline as pl
from paceline.tensors.stale_arithmetic import BLOCK
from paceline.tensors.stale_vectors import StaleVectors
from tiny_jobs import tiny_job

SIZES = (BLOCK + 7, 3)  # sizes of two flat vectors: more than a block, and less


def vectors(seed, dtype=torch.float64):
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=drawn, dtype=torch.float64).to(dtype) for size in SIZES]


def delayed(staleness=3, learning_rate=0.5, g=None, now=None, then=None):
    g = g or vectors(0)
    squared_norm = sum(float((each.double() ** 2).sum()) for each in g)
    return StaleVectors(
        staleness=staleness,
        learning_rate=learning_rate,
        squared_norm=squared_norm,
        gradient=g,
        now=now or vectors(1),
        then=then or vectors(2),
    )


def trained(protocol, **changes):
    stop = pl.Stop(updates=25)
    return pl.train(tiny_job(**changes), protocol=protocol, cluster=pl.Cluster(4), stop=stop, seed=3)
