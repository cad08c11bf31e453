"""The constants of the error bounds, from runs on a loss whose constants are known."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

SIDES = torch.tensor([2.0, 1.0, 0.5])


class Point(nn.Module):
    """Parameters w; the loss of a sample x is sum(a^2 (w - x)^2) / 2, so H = diag(a^2), and F* = E sum(a^2 x^2) / 2."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), 3.0, dtype=torch.float64))


def loss(model, batch):
    [x] = batch
    return ((SIDES * (model.w - x)) ** 2).sum(1).mean() / 2


def recorded(out, samples):
    job = pl.Job(
        model=Point,
        step=loss,
        data=TensorDataset(samples),
        optimizer=partial(torch.optim.SGD, lr=0.02),
        batch_size=4,
    )
    stop = pl.Stop(updates=300)
    pl.train(job, protocol=pl.bsp(), cluster=pl.Cluster(8), stop=stop, out=out, measure_steps=True)
    return out


@pytest.mark.slow
def test_the_constants_of_a_quadratic_are_found(tmp_path):
    # With noise of the covariance 1 / a^2 of x, that of a sample's gradient is a^2, the Hessian: a log-likelihood.
    samples = torch.tensor(np.random.default_rng(0).normal(size=(20_000, 3))) / SIDES
    least = float(((SIDES * samples) ** 2).sum(1).mean() / 2)
    found = pl.results.estimate_constants(recorded(tmp_path / "run", samples), least_loss=0.9 * least)
    assert found.m == 4
    assert found.sigma2 == pytest.approx(float((SIDES**2).sum()), rel=0.1)
    assert found.M_G < 0.2
    assert found.initial_error == pytest.approx(9 * float((SIDES**2).sum()) / 2, rel=0.2)
    assert float(SIDES.min() ** 2) * 0.5 < found.c < found.L
    assert (SIDES**2).mean() < found.L < 3 * (SIDES**2).max()


@pytest.mark.slow
def test_a_loss_below_the_minimum_is_refused(tmp_path):
    run = recorded(tmp_path / "run", torch.zeros(100, 3, dtype=torch.float64))
    for least_loss in (5.0, float("nan")):
        with pytest.raises(pl.UsageError, match="give a smaller one"):
            pl.results.estimate_constants(run, least_loss=least_loss)


def test_stale_gradients_are_refused(tmp_path):
    job = pl.jobs.digits(batch_size=8)
    pl.train(
        job, protocol="k_async(k=2)", cluster=pl.Cluster(4), stop="updates=40", out=tmp_path / "run", measure_steps=True
    )
    with pytest.raises(pl.UsageError, match="record a run of k_sync or bsp"):
        pl.results.estimate_constants(tmp_path / "run")
