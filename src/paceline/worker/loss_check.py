"""Detection of a loss that grows with the size of its minibatch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from paceline.errors import PacelineWarning
from paceline.jobs.job import Job
from paceline.jobs.sample_numbers import SampleNumbers
from paceline.worker.data_loader import fetch
from paceline.worker.evaluation import evaluating
from paceline.worker.seeding import seeded
from paceline.worker.torch_utils import to_device

TOLERANCE = 1e-3  # relative


def warn_of_summed_loss(job: Job, model: nn.Module) -> None:
    """Warn if the loss of a minibatch is the sum, not the mean, of the losses of its halves.

    Losses and gradients of minibatches of different sizes cannot be compared then. Data that are iterable, or that this
    process does not have, are not checked.
    """
    if job.is_iterable or isinstance(job.data, SampleNumbers):
        return
    size = min(job.batch_size, len(job.data))  # type: ignore[arg-type]  # map-style
    if size < 2:
        return
    half = size // 2
    with evaluating(model), torch.no_grad():
        [whole] = _losses(job, model, [range(size)])
        first, second = _losses(job, model, [range(half), range(half, size)])
    is_sum = np.isclose(whole, first + second, rtol=TOLERANCE)
    is_mean = np.isclose(whole, (half * first + (size - half) * second) / size, rtol=TOLERANCE)
    if is_sum and not is_mean:
        warnings.warn(
            f"job {job.name}: the loss of a minibatch is the sum of its samples' losses, but the chosen protocol "
            "compares minibatches of different sizes; reduce the loss with .mean()",
            PacelineWarning,
            stacklevel=2,
        )


def _losses(job: Job, model: nn.Module, minibatches: Sequence[range]) -> list[float]:
    """Return the losses of minibatches, each collated by itself: a batch may not be divisible."""
    device = next(model.parameters()).device
    with seeded(0, device):  # the same augmentation for each grouping of the samples
        return [float(job.loss_of(model, to_device(fetch(job, np.array(each)), device))[0]) for each in minibatches]
