"""What has to be known of the job's optimizer: whether it can step here, and how its step is made shorter."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from math import inf
from operator import not_
from typing import Any, Literal

import torch
from torch import nn

from paceline.errors import PacelineWarning, UsageError
from paceline.jobs.job import Job
from paceline.server.zero_gradients import shortened
from paceline.utils.user_code import note_place


def make_optimizer(job: Job, parameters: list[nn.Parameter], model: nn.Module) -> torch.optim.Optimizer:
    """Return the job's optimizer of these parameters of a model.

    Raises:
        UsageError: it is none, or one that a parameter server cannot step.
    """
    try:
        optimizer = _made(job, parameters, model)
    except Exception as error:
        note_place(error, f"the optimizer of job {job.name} could not be made")
        raise
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
    if not held_by(optimizer, parameters):
        raise UsageError(
            f"job {job.name}: the optimizer holds none of the model's {len(parameters)} trainable parameters, so "
            "nothing would be trained; make it from the parameters that it is given, for example "
            "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    if job.schedule is not None:
        _check_scalable(job, optimizer, "schedule")
    return optimizer


def held_by(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> set[int]:
    """Return which of these parameters the optimizer has in its groups, by their places."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {i for i, parameter in enumerate(parameters) if id(parameter) in held}


def warn_of_parameters_left_out(job: Job, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Warn of trainable parameters that no group of the optimizer holds: they stay as they are."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    held = held_by(optimizer, [parameter for _, parameter in named])
    left_out = [name for i, (name, _) in enumerate(named) if i not in held]
    if left_out:
        warnings.warn(
            f"job {job.name}: the optimizer holds {len(held)} of the model's {len(named)} trainable parameters, so "
            f"{shortened(left_out)} will not change; give them to the optimizer, or set requires_grad=False",
            PacelineWarning,
            stacklevel=2,
        )


def _made(job: Job, parameters: list[nn.Parameter], model: nn.Module) -> torch.optim.Optimizer:
    """Return what the job's factory makes of what its first argument is called after."""
    exempt = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, tuple(job.no_decay_on))
        for parameter in module.parameters(recurse=False)
    }
    match _first_argument(job.optimizer):
        case "model":
            optimizer = job.optimizer(model)
        case "named_parameters":
            named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
            optimizer = job.optimizer(named)
        case _:
            return job.optimizer(_groups(parameters, exempt))
    if exempt and isinstance(optimizer, torch.optim.Optimizer):
        _take_decay_off(optimizer, exempt)
    return optimizer


def _first_argument(factory: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(factory).parameters), "")
    except ValueError:  # a function in C may have no signature
        return ""


def _groups(parameters: list[nn.Parameter], exempt: Container[int]) -> Iterable[Any]:
    """Return the parameters; those that are to have no weight decay in a group of their own, after the others."""
    others = [parameter for parameter in parameters if id(parameter) not in exempt]
    spared = [parameter for parameter in parameters if id(parameter) in exempt]
    if not spared:
        return parameters
    groups = ({"params": others}, {"params": spared, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _take_decay_off(optimizer: torch.optim.Optimizer, exempt: Container[int]) -> None:
    """Move exempt parameters of each group into a group like it without weight decay, after all others."""
    for group in list(optimizer.param_groups):
        is_exempt = [id(parameter) in exempt for parameter in group["params"]]
        if all(is_exempt):
            group["weight_decay"] = 0.0
        elif any(is_exempt):
            spared = {**group, "weight_decay": 0.0}
            for key in {"params", "param_names"} & set(group):
                spared[key] = list(compress(group[key], is_exempt))
                group[key] = list(compress(group[key], map(not_, is_exempt)))
            optimizer.param_groups.append(spared)


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


def check_state_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Refuse loaded state of one of torch's optimizers whose tensors have not the shape of their parameter.

    Adafactor keeps rows and columns, and other libraries keep what they like, so those are not checked.

    Raises:
        ValueError: a tensor that is no scalar has another shape.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or type(optimizer).__name__ in SHAPES_OF_THEIR_OWN:
        return
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != parameter.shape:
                raise ValueError(
                    f"{name} of the optimizer is {list(value.shape)}, expected {list(parameter.shape)} as its parameter"
                )


SHAPES_OF_THEIR_OWN = ("Adafactor", "LBFGS", "SparseAdam")
