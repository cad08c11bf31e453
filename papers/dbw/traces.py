"""Fig. 1 and 2: DBW's estimates before each update, and the true values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import isfinite, nan
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import paceline as pl
from paceline.core.events import Step
from paceline.core.records import GradientArrived, StepMeasured
from paceline.jobs.datasets.images import ImageDataset
from paceline.policies.estimators.dbw.gain import GainEstimator, GainInput
from paceline.recording.history import History
from paceline.worker.data_loader import fetch
from papers.dbw.jobs import make_job
from papers.dbw.settings import TRACED
from papers.probe import probe
from papers.store import Line, rounded
from papers.tasks import Where, unbroken


class Estimate(NamedTuple):
    """Estimates before an update: squared norm of the gradient, its variance, and the loss."""

    k: int
    squared_norm: float
    variance: float
    gain: float


class Truth(NamedTuple):
    """True values of a version on the probe."""

    loss: float
    squared_norm: float
    variance: float


class Trajectory:
    """Store of the parameters of all versions of a run.

    Attributes:
        versions: parameters of each version as one vector, from the first.
    """

    def __init__(self) -> None:
        self.versions: list[Tensor] = []

    def sgd(self, parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.SGD:
        """Return an optimizer that appends a copy of the parameters at each step."""
        parameters = list(parameters)
        self.versions = [_flat(parameters)]
        optimizer = torch.optim.SGD(parameters, lr=lr)
        optimizer.register_step_post_hook(lambda *_: self.versions.append(_flat(parameters)))
        return optimizer


@dataclass(frozen=True)
class Trace:
    """One run of a traced figure."""

    figure: str
    cluster: pl.Cluster
    seed: int

    def asked(self) -> Line:
        """Return the fields as plain JSON."""
        each = TRACED[self.figure]
        settings = {"batch_size": each.batch_size, "lr": each.lr, "D": each.D, "cluster": str(self.cluster)}
        return {"figure": self.figure, **settings, "updates": each.updates, "seed": self.seed}

    def carry_out(self, where: Where) -> Line:
        """Train with DBW, and return the estimates and true values of every update."""
        figure, trajectory = TRACED[self.figure], Trajectory()
        job = make_job(figure.job, figure.batch_size, figure.lr, "constant", where.folder)
        job = replace(job, optimizer=partial(trajectory.sgd, lr=figure.lr), eval_data=None)
        result = unbroken(
            pl.train(
                job,
                protocol=f"dbw(D={figure.D})",
                cluster=replace(self.cluster, device=where.device),
                stop=pl.Stop(updates=where.updates or figure.updates),
                seed=self.seed,
            )
        )
        expected = estimates(result.history, figure.D, figure.lr, self.cluster.n)
        truths = [truth(job, weights, where.device) for weights in trajectory.versions]
        return side_by_side(expected, truths)


def side_by_side(expected: Sequence[Estimate], truths: Sequence[Truth]) -> Line:
    """Return the estimates and true values of every update, and how well they agree.

    Args:
        truths: true values of the versions before and after all updates.
    """
    decrease = [before.loss - after.loss for before, after in pairwise(truths)]
    known = [i for i, each in enumerate(expected) if isfinite(each.gain)]
    return {
        "k": [each.k for each in expected],
        "estimated": {name: rounded(getattr(each, name) for each in expected) for name in Estimate._fields[1:]},
        "true": {
            "squared_norm": rounded(each.squared_norm for each in truths[:-1]),
            "variance": rounded(each.variance for each in truths[:-1]),
            "decrease": rounded(decrease),
            "loss": rounded(each.loss for each in truths),
        },
        "rank_correlation": _rank([expected[i].gain for i in known], [decrease[i] for i in known]),
        "median_error": {
            name: _error([getattr(expected[i], name) for i in known], [getattr(truths[i], name) for i in known])
            for name in ("squared_norm", "variance")
        },
    }


def _rank(gains: Sequence[float], decreases: Sequence[float]) -> float:
    """Return Spearman's rank correlation; nan for fewer than two pairs."""
    if len(gains) < 2:
        return nan
    return round(float(spearmanr(gains, decreases).statistic), 4)


def _error(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of |ours / theirs - 1|; nan without values."""
    if not ours:
        return nan
    return round(float(np.median(np.abs(np.array(ours) / np.array(theirs) - 1))), 4)


def estimates(history: History, D: int, lr: float, n: int) -> list[Estimate]:
    """Return the estimates before every update of a run, computed from its records.

    Args:
        D: number of updates in its means.
        lr: constant learning rate.
        n: number of workers, >= 1.
    """
    estimator, found = GainEstimator(D), []
    for k, update in updates(history):
        gains = estimator.gains([lr] * n)
        found.append(Estimate(k, estimator.squared_norm, estimator.variance, gains[k - 1] if gains else nan))
        estimator.observe(update)
    return found


def updates(history: History) -> Iterator[tuple[int, GainInput]]:
    """Yield k and the statistics of the gradients of each update."""
    used: list[GradientArrived] = []
    for record in history:
        match record:
            case GradientArrived(used=True):
                used.append(record)
            case StepMeasured():
                step = Step(*(getattr(record, field) for field in Step._fields))
                losses, norms = np.mean([(each.loss, each.squared_norm) for each in used], axis=0)
                yield (
                    len(used),
                    GainInput(k=len(used), loss=float(losses), mean_square=float(norms), within=nan, step=step),
                )
                used = []


def truth(job: pl.Job, weights: Tensor, device: str) -> Truth:
    """Return the loss of a version, the squared norm of its gradient, and the variance of a minibatch gradient.

    The probe is cut into m minibatches. Their mean gradient g has a squared norm that is too large by variance / m.

    Args:
        weights: parameters of the version as one vector.
    """
    assert isinstance(job.data, ImageDataset)
    model = job.build_model(0).to(device)
    nn.utils.vector_to_parameters(weights.to(device), model.parameters())
    chosen, m, size = probe(job.data), 0, job.batch_size
    losses, gradients = [], []
    for start in range(0, len(chosen) - size + 1, size):
        batch = fetch(job, np.arange(start, start + size), chosen)
        model.zero_grad()
        loss, _ = job.loss_of(model, [part.to(device) for part in batch])
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double())
        m += 1
    stacked = torch.stack(gradients)
    mean = stacked.mean(dim=0)
    variance = float(((stacked - mean) ** 2).sum()) / (m - 1)
    return Truth(float(np.mean(losses)), max(float(mean @ mean) - variance / m, 0.0), variance)


def _flat(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in parameters]).cpu().clone()
