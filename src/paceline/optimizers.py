"""What has to be known of the job's optimizer: whether it can step here, and how its step is made shorter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, Literal

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.job import Job


def make_optimizer(job: Job, parameters: list[nn.Parameter], model: nn.Module) -> torch.optim.Optimizer:
    """Return the job's optimizer of these parameters of a model.

    Raises:
        UsageError: it is none, or one that a parameter server cannot step.
    """
    optimizer = job.optimizer(_groups(job, parameters, model))
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
    if job.schedule is not None:
        _check_scalable(job, optimizer, "schedule")
    return optimizer


def _groups(job: Job, parameters: list[nn.Parameter], model: nn.Module) -> Iterable[Any]:
    """Return the parameters; those that are to have no weight decay in a group of their own, after the others."""
    exempt = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, tuple(job.no_decay_on))
        for parameter in module.parameters(recurse=False)
    }
    others = [parameter for parameter in parameters if id(parameter) not in exempt]
    spared = [parameter for parameter in parameters if id(parameter) in exempt]
    if not spared:
        return parameters
    groups = ({"params": others}, {"params": spared, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _check_scalable(job: Job, optimizer: torch.optim.Optimizer, scaled_by: str) -> None:
    for kind, why in _CANNOT_SCALE.items():
        if isinstance(optimizer, kind):
            raise UsageError(f"job {job.name}: {kind.__name__} {why}; give another optimizer, or no {scaled_by}")


def scaled_part(job: Job, optimizer: torch.optim.Optimizer) -> Literal["gradient", "learning rate"]:
    """Return what a step scale multiplies: the gradient where the step is linear in it, else the learning rate.

    SGD is linear in it, with momentum and weight decay too; clipping undoes the scale, and adaptive optimizers divide
    by it.

    Raises:
        UsageError: neither would scale this very step.
    """
    _check_scalable(job, optimizer, "staleness_lr or staleness_weight")
    is_linear = type(optimizer) is torch.optim.SGD and job.clip_norm is None
    return "gradient" if is_linear else "learning rate"


_CANNOT_SCALE = {
    torch.optim.Rprop: "steps by the signs of gradients and by step sizes of its own, so nothing that is done to "
    "gradient or learning rate scales its step",
    torch.optim.ASGD: "works out the learning rate of a step in the step before, so a scale would come a step late",
}


def check_momentum(job: Job, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose momentum cannot be limited.

    Raises:
        UsageError: it has none that is called so, or one of 0.
    """
    momenta = [group.get("momentum", 0.0) for group in optimizer.param_groups]
    if not any(momenta):
        raise UsageError(
            f"job {job.name}: {type(optimizer).__name__} has no momentum that a rule for it could change; give an "
            "optimizer such as SGD with momentum=0.9, or leave momentum(...) out of the plan"
        )


# At 0, torch's SGD would leave its buffer as it is, to come back when the limit rises; times this, it is forgotten.
_LEAST_MOMENTUM = 1e-30
_CHANGED = ("lr", "momentum", "weight_decay")


@contextmanager
def stepping(
    optimizer: torch.optim.Optimizer,
    lr_scale: float,
    momentum_limit: float = inf,
    weight_decay_scale: float = 1.0,
) -> Iterator[None]:
    """Let the optimizer step with its learning rates and weight decays times a scale, and with limited momentum."""
    if lr_scale == 1.0 and momentum_limit == inf and weight_decay_scale == 1.0:
        yield
        return
    own: list[dict[str, float]] = [
        {key: group[key] for key in _CHANGED if key in group} for group in optimizer.param_groups
    ]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * lr_scale
        if "weight_decay" in group:
            group["weight_decay"] = group["weight_decay"] * weight_decay_scale
        if group.get("momentum", 0.0) > momentum_limit:
            group["momentum"] = max(momentum_limit, _LEAST_MOMENTUM)
    try:
        yield
    finally:
        for group, before in zip(optimizer.param_groups, own, strict=True):
            group.update(before)
