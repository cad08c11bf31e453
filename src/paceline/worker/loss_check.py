"""Checks of a loss: whether it grows with its minibatch, and whether it is the mean of the losses of pieces."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.errors import PacelineWarning, UsageError
from paceline.jobs.job import Job, trainable
from paceline.jobs.sample_numbers import SampleNumbers
from paceline.protocols.protocol import Plan
from paceline.utils.user_code import at_place
from paceline.worker.batch_weight import weight_of
from paceline.worker.data_loader import fetch
from paceline.worker.evaluation import evaluating
from paceline.worker.seeding import seeded
from paceline.worker.torch_utils import to_device

TOLERANCE = 1e-3  # relative
ROUNDING = 10.0  # times the change of a gradient by another order of the samples
FROZEN = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)  # a model in evaluation may give no loss


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


def check_loss_of_pieces(job: Job, model: nn.Module, piece: int, plan: Plan) -> None:
    """Check that minibatches can be computed in pieces.

    Args:
        job: job to compute.
        model: its model at the beginning of the run.
        piece: samples of a piece, >= 1.
        plan: plan of the run, for the message.

    Raises:
        UsageError: see `why_not_in_pieces`.
    """
    if reason := why_not_in_pieces(job, model, piece):
        raise UsageError(
            f"job {job.name}: {reason}, but {plan} computes pieces: give weight=, from a batch to the number that its "
            "loss is a mean over, or type bsp"
        )


def why_not_in_pieces(job: Job, model: nn.Module, piece: int) -> str:
    """Return why the gradient of a minibatch is not the mean of those of its pieces; empty if it is.

    The mean is by samples, or by the job's weight.

    ``|g - sum(w_j g_j) / sum(w_j)| <= 0.001 |g|``, or ten times what another order of the samples changes, with
    dropout off and frozen statistics. Data that are iterable, or that this process does not have, are not checked.

    Args:
        job: job to compute.
        model: its model at the beginning of the run.
        piece: samples of a piece, >= 1.
    """
    if job.is_iterable or isinstance(job.data, SampleNumbers):
        return ""
    order = np.arange(min(job.batch_size, len(job.data)))  # type: ignore[arg-type]  # map-style
    with _frozen(model), at_place(f"job {job.name} failed for its first samples"):
        whole, _ = _gradient(job, model, order)
        mean, weights = torch.zeros_like(whole), 0.0
        for begin in range(0, len(order), piece):
            gradient, weight = _gradient(job, model, order[begin : begin + piece])
            mean += gradient * weight
            weights += weight
        other, _ = _gradient(job, model, order[::-1])
    norm = float(whole.norm())
    difference = float((mean / (weights or 1.0) - whole).norm())
    if difference > max(TOLERANCE * norm, ROUNDING * float((other - whole).norm())):
        return (
            "the gradient of a minibatch is not the mean of those of its pieces (it differs by "
            f"{difference / (norm or 1.0):.2g} of its norm), as where a loss is a sum, a mean over tokens, or compares "
            "samples"
        )
    return ""


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Turn dropout off and freeze the statistics of batches in a block, and restore all buffers after it."""
    changed = [module for module in model.modules() if module.training and isinstance(module, FROZEN)]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for module in changed:
        module.eval()
    try:
        yield
    finally:
        for module in changed:
            module.train()
        for buffer, value in buffers:
            buffer.copy_(value)


def _gradient(job: Job, model: nn.Module, samples: NDArray[np.int64]) -> tuple[Tensor, float]:
    """Return the gradient of a batch, in one vector, and what it counts in a mean."""
    parameters = trainable(model)
    device = parameters[0].device
    with seeded(0, device):
        batch = fetch(job, samples)
        weight = weight_of(job, batch, len(samples))
        if not weight:  # whose loss may not be finite
            return torch.zeros(sum(each.numel() for each in parameters), device=device), weight
        loss, _ = job.loss_of(model, to_device(batch, device))
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([each.reshape(-1) for each in gradients]), weight


def _losses(job: Job, model: nn.Module, minibatches: Sequence[range]) -> list[float]:
    """Return the losses of minibatches, each collated by itself: a batch may not be divisible."""
    device = next(model.parameters()).device
    with seeded(0, device):  # the same augmentation for each grouping of the samples
        return [float(job.loss_of(model, to_device(fetch(job, np.array(each)), device))[0]) for each in minibatches]
