"""What has to be known of the job's optimizer: whether it can step here, and how its step is made shorter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.job import Job


def make_optimizer(job: Job, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the job's optimizer of these parameters.

    Raises:
        UsageError: it is none, or one that a parameter server cannot step.
    """
    optimizer = job.optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"job {job.name}: optimizer() returned {type(optimizer).__name__}, expected a torch.optim.Optimizer; "
            "for example optimizer=partial(torch.optim.SGD, lr=0.1)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            f"job {job.name}: LBFGS evaluates the loss within a step, which a parameter server cannot do; "
            "give an optimizer whose step() needs gradients only"
        )
    return optimizer


def scaled_part(job: Job, optimizer: torch.optim.Optimizer) -> Literal["gradient", "learning rate"]:
    """Return what a step scale multiplies: the gradient where the step is linear in it, else the learning rate.

    SGD is linear in it, with momentum and weight decay too; clipping undoes the scale, and adaptive optimizers divide
    by it.

    Raises:
        UsageError: neither would scale this very step.
    """
    for kind, why in _CANNOT_SCALE.items():
        if isinstance(optimizer, kind):
            raise UsageError(
                f"job {job.name}: {kind.__name__} {why}; give another optimizer, or no staleness_lr or staleness_weight"
            )
    is_linear = type(optimizer) is torch.optim.SGD and job.clip_norm is None
    return "gradient" if is_linear else "learning rate"


_CANNOT_SCALE = {
    torch.optim.Rprop: "steps by the signs of gradients and by step sizes of its own, so nothing that is done to "
    "gradient or learning rate scales its step",
    torch.optim.ASGD: "works out the learning rate of a step in the step before, so a scale would come a step late",
}


@contextmanager
def scaled(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Let the optimizer step with its learning rates times a factor."""
    if factor == 1.0:
        yield
        return
    own = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr
