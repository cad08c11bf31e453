"""A loss that grows with its minibatch, found out before a controller compares losses."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import nn

from paceline.data import fetch
from paceline.engines.replica import evaluating, parts, seeded, to_device
from paceline.errors import PacelineWarning
from paceline.job import Job

NEAR = 1e-3  # relative


def warn_of_summed_loss(job: Job, model: nn.Module) -> None:
    """Warn if the loss of a minibatch is the sum of those of its halves, and not their mean.

    The losses and gradients of minibatches of different sizes cannot be compared then. Data that can only be read in
    sequence are not looked at.
    """
    if job.is_iterable or job.batch_size < 2:
        return
    device = next(model.parameters()).device
    size = min(job.batch_size, len(job.data))  # type: ignore[arg-type]  # map-style
    with seeded(0, device), evaluating(model), torch.no_grad():
        batch = to_device(fetch(job, np.arange(size)), device)
        whole = float(job.loss_of(model, batch)[0])
        halves = [(float(job.loss_of(model, part)[0]), share) for part, share in parts(batch, size, 2)]
    is_sum = np.isclose(whole, sum(loss for loss, _ in halves), rtol=NEAR)
    is_mean = np.isclose(whole, sum(loss * share for loss, share in halves), rtol=NEAR)
    if is_sum and not is_mean:
        warnings.warn(
            f"job {job.name}: the loss of a minibatch is the sum of its samples' losses, so that minibatches of "
            "different sizes cannot be compared, which the chosen protocol does; reduce it with .mean()",
            PacelineWarning,
            stacklevel=2,
        )
