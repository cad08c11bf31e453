"""Evaluation of a model: mean loss and metrics over the evaluation data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import nn

from paceline.core.stop import Stop
from paceline.errors import RunError, UsageError
from paceline.jobs.job import Job
from paceline.jobs.metrics import Averages
from paceline.utils.rng import derived_seed
from paceline.utils.user_code import at_place
from paceline.worker.data_loader import batch_len, eval_batches
from paceline.worker.seeding import seeded
from paceline.worker.torch_utils import to_device


def evaluate(job: Job, model: nn.Module, seed: int, batches: int | None = None) -> dict[str, float]:
    """Return the mean loss and the mean of every metric over the evaluation data, in evaluation mode.

    Args:
        job: job with the evaluation data.
        model: model to evaluate.
        seed: seed of the run, >= 0.
        batches: number of batches, from the first one; None for all.

    Raises:
        UsageError: a metric is not a number, or its name is not text.
        RunError: there are no evaluation data.
    """
    device = next(model.parameters()).device
    averages = Averages(job.name)
    place = at_place(f"the evaluation of job {job.name} failed")
    with place, evaluating(model), torch.no_grad(), seeded(derived_seed(seed, "evaluation"), device):
        for batch in islice(eval_batches(job), batches):
            loss, metrics = job.loss_of(model, to_device(batch, device))
            averages.add({"loss": loss, **metrics}, batch_len(batch))
        means = averages.means()
    if not means:
        raise RunError(f"job {job.name}: the evaluation data are empty; expected at least one sample")
    return means


def check_reported(job: Job, model: nn.Module, seed: int, stop: Stop) -> None:
    """Check that the first batch of the evaluation data reports all metrics that the stop rule needs.

    Raises:
        UsageError: a metric is not reported.
    """
    if not stop.evaluated:
        return
    reported = evaluate(job, model, seed, batches=1)
    for target in stop.evaluated:
        if target.metric not in reported:
            raise UsageError(f"job {job.name}: {target.missing(list(reported))}")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
