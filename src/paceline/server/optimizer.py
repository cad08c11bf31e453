"""The job's optimizer: construction, checks, and steps with scaled learning rate and limited momentum."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from math import inf
from numbers import Real
from operator import not_
from typing import Any, Literal

import torch
from torch import nn

from paceline.errors import PacelineWarning, UsageError
from paceline.jobs.job import Job
from paceline.server.zero_gradients import shortened
from paceline.utils.user_code import at_place
from paceline.utils.wording import printable

LONGEST_REASON = 1000  # characters
# Option of the groups of a copy of an optimizer, so that checkpoints and states that ranks send have it.
OWN_OPTIONS = "paceline_own_options"


def make_optimizer(job: Job, parameters: list[nn.Parameter], model: nn.Module) -> torch.optim.Optimizer:
    """Return the job's optimizer for these parameters of a model.

    Raises:
        UsageError: the factory returned no optimizer, or one that a parameter server cannot step.
    """
    with at_place(f"the optimizer of job {job.name} could not be made"):
        optimizer = _call_factory(job, parameters, model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"job {job.name}: optimizer() returned {type(optimizer).__name__}, expected a torch.optim.Optimizer; "
            "for example optimizer=partial(torch.optim.SGD, lr=0.1)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            f"job {job.name}: LBFGS evaluates the loss within a step, but a parameter server has gradients only; "
            "give an optimizer whose step() needs gradients only"
        )
    if not held_by(optimizer, parameters):
        raise UsageError(
            f"job {job.name}: the optimizer holds none of the model's {len(parameters)} trainable parameters, so "
            "nothing would be trained; build it from the parameters that the factory receives, for example "
            "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    if job.schedule is not None:
        _check_scalable(job, optimizer, "schedule")
    return optimizer


def held_by(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> set[int]:
    """Return the indices of these parameters that are in the optimizer's groups."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {i for i, parameter in enumerate(parameters) if id(parameter) in held}


def warn_of_parameters_left_out(job: Job, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Warn of trainable parameters that are in no parameter group: they will not change."""
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


def _call_factory(job: Job, parameters: list[nn.Parameter], model: nn.Module) -> torch.optim.Optimizer:
    """Call the job's factory with what the name of its first argument asks for."""
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
        _remove_weight_decay(optimizer, exempt)
    return optimizer


def _first_argument(factory: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(factory).parameters), "")
    except ValueError:  # a function in C may have no signature
        return ""


def _groups(parameters: list[nn.Parameter], exempt: Container[int]) -> Iterable[Any]:
    """Return the parameters, or two groups of them: the last one, without weight decay, has the exempt ones."""
    others = [parameter for parameter in parameters if id(parameter) not in exempt]
    spared = [parameter for parameter in parameters if id(parameter) in exempt]
    if not spared:
        return parameters
    groups = ({"params": others}, {"params": spared, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _remove_weight_decay(optimizer: torch.optim.Optimizer, exempt: Container[int]) -> None:
    """Move the exempt parameters of each group into a copy of the group without weight decay, at the end."""
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

    The step of SGD is linear in the gradient, also with momentum and weight decay. Clipping cancels a scale of the
    gradient, and adaptive optimizers divide by it.

    Raises:
        UsageError: neither of them would scale the step of this optimizer.
    """
    _check_scalable(job, optimizer, "staleness_lr or staleness_weight")
    is_linear = type(optimizer) is torch.optim.SGD and job.clip_norm is None
    return "gradient" if is_linear else "learning rate"


_CANNOT_SCALE = {
    torch.optim.Rprop: "steps by the signs of gradients and by its own step sizes, so neither a scaled gradient nor a "
    "scaled learning rate scales its step",
    torch.optim.ASGD: "computes the learning rate of a step in the step before, so a scale would act one step late",
}


def check_momentum(job: Job, optimizer: torch.optim.Optimizer) -> None:
    """Check that the momentum of an optimizer can be limited.

    Raises:
        UsageError: the optimizer has no option `momentum`, or its momentum is 0.
    """
    momenta = [group.get("momentum", 0.0) for group in optimizer.param_groups]
    if not any(momenta):
        raise UsageError(
            f"job {job.name}: {type(optimizer).__name__} has no momentum to limit; give an "
            "optimizer such as SGD with momentum=0.9, or leave momentum(...) out of the plan"
        )


# At 0, torch's SGD leaves its momentum buffer unchanged, so old momentum would return when the limit rises. Times
# this factor, the buffer is cleared.
_LEAST_MOMENTUM = 1e-30
_CHANGED = ("lr", "momentum", "dampening", "weight_decay")


@contextmanager
def stepping(
    optimizer: torch.optim.Optimizer,
    lr_scale: float,
    momentum_limit: float = inf,
    weight_decay_scale: float = 1.0,
    momentum_power: float = 1.0,
) -> Iterator[None]:
    """Scale learning rates and weight decays and change the momentum while the context is open.

    A momentum m becomes min(m^p, limit), and a gradient enters the velocity with the factor (1 - m^p) / (1 - m), by the
    dampening. So it moves the parameters as far in the long run, and the velocity keeps its size when p changes. Only
    the first gradient of a run enters it whole, as in torch. With Nesterov's momentum the learning rate is divided by
    1 + m^p - m, for the part of the gradient that does not enter the velocity.
    """
    if (lr_scale, momentum_limit, weight_decay_scale, momentum_power) == (1.0, inf, 1.0, 1.0):
        yield
        return
    own: list[dict[str, float]] = [
        {key: group[key] for key in _CHANGED if key in group} for group in optimizer.param_groups
    ]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * lr_scale
        if "weight_decay" in group:
            group["weight_decay"] = group["weight_decay"] * weight_decay_scale
        if momentum_power != 1.0 and 0 < group.get("momentum", 0.0) < 1:
            own_momentum, momentum = group["momentum"], group["momentum"] ** momentum_power
            group["dampening"] = 1 - (1 - group["dampening"]) * (1 - momentum) / (1 - own_momentum)
            group["momentum"] = momentum
            if group["nesterov"]:
                group["lr"] /= 1 + momentum - own_momentum
        if group.get("momentum", 0.0) > momentum_limit:
            group["momentum"] = max(momentum_limit, _LEAST_MOMENTUM)
    try:
        yield
    finally:
        for group, before in zip(optimizer.param_groups, own, strict=True):
            group.update(before)


def set_learning_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Set the learning rate of each parameter group.

    Raises:
        ValueError: there is another number of groups.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):  # which some optimizers keep
            group["lr"] = torch.full_like(group["lr"], rate)
        else:
            group["lr"] = rate


def own_options(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the names of the options that the steps of an optimizer change, as a count of its steps."""
    return {name for group in optimizer.param_groups for name in group.get(OWN_OPTIONS, ())}


def set_options(optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]]) -> str:
    """Set options of each parameter group of an optimizer, but for those that its steps change; none for no change.

    Returns:
        Why the optimizer does not take them, empty if it does.
    """
    changes = [
        {
            name: value
            for name, value in new.items()
            if name not in group.get(OWN_OPTIONS, ()) and group.get(name) != value
        }
        for group, new in zip(optimizer.param_groups, options, strict=False)
    ]
    for group, changed in zip(optimizer.param_groups, changes, strict=False):
        if changed and (reason := _why_refused(optimizer, group, changed)):
            return reason
    for group, changed in zip(optimizer.param_groups, changes, strict=False):
        group.update(changed)
    return ""


def _why_refused(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
    """Return why an optimizer does not take changed options of a group, empty if it does.

    A class of torch checks them when it is made, or when it steps: so another one steps before and after the change.
    """
    kind = type(optimizer)
    if unknown := changed.keys() - optimizer.defaults.keys():
        return printable(f"{kind.__name__} has no option {', '.join(sorted(unknown))}", LONGEST_REASON)
    refused = f"{kind.__name__} does not take {printable(str(dict(changed)), LONGEST_REASON // 2)}"
    for name, value in changed.items():
        if not _are_alike(value, group[name]):
            return f"{refused}: expected a value like {group[name]}"
    if not _is_of_torch(optimizer):
        return ""
    known = inspect.signature(kind).parameters.keys() & group.keys() - {"params"}
    own = {name: group[name] for name in known}
    parameter = nn.Parameter(torch.zeros(1, 1, device=group["params"][0].device))  # Muon takes matrices only
    parameter.grad = torch.zeros_like(parameter)
    try:
        kind([parameter], **{**own, **{name: changed[name] for name in known & changed.keys()}})
        tried = kind([parameter], **own)
        tried.step()
        tried.param_groups[0].update(changed)
        tried.step()
    except Exception as error:  # it would end the server
        return printable(f"{refused}: {type(error).__name__}: {error}", LONGEST_REASON)
    return ""


def _are_alike(one: object, other: object) -> bool:
    """Return whether two values of an option are of one kind; None, as of `foreach`, leaves the value to torch."""
    if one is None or other is None:
        return True
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    return _kind_of(one) is _kind_of(other)


def _kind_of(value: object) -> type:
    """Return the type of a value; numbers, also of numpy and in a tensor, have one."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return float if is_number or (isinstance(value, torch.Tensor) and not value.ndim) else type(value)


def load_checked(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state into an optimizer, with options and tensors that it can step with.

    Raises:
        ValueError: an option or a tensor is of another kind or shape than here.
    """
    own = [dict(group) for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(dict(state))
    except Exception as error:
        raise ValueError(f"the optimizer does not load its state: {error}") from error
    for group, before in zip(optimizer.param_groups, own, strict=True):
        for name, value in before.items():
            given = group.setdefault(name, value)  # an earlier version of torch may not have had it
            if name not in ("params", OWN_OPTIONS) and not _are_alike(given, value):
                raise ValueError(f"{name} of the optimizer is {str(given)[:40]!r}, expected a value like {value!r}")
            if isinstance(value, torch.Tensor) and isinstance(given, Real):
                group[name] = torch.full_like(value, float(given))
        options = before.keys() & optimizer.defaults.keys()
        changed = {name: group[name] for name in options if group[name] != before[name]}
        if changed and _is_of_torch(optimizer) and (reason := _why_refused(optimizer, before, changed)):
            raise ValueError(reason)
    _check_state(optimizer)


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """Check the loaded state of one of torch's optimizers: the same tensors of each parameter, with its shape.

    Adafactor stores rows and columns, and optimizers of other libraries may store other values: they are not checked.

    Raises:
        ValueError: a value is missing, is no tensor, or has another shape and is no scalar.
    """
    if not _is_of_torch(optimizer) or type(optimizer).__name__ in _OTHER_SHAPES:
        return
    for group in optimizer.param_groups:
        states = [set(optimizer.state[each]) for each in group["params"] if optimizer.state.get(each)]
        if missing := set().union(*states).difference(set.intersection(*states) if states else ()):
            raise ValueError(f"{min(map(str, missing))} of the optimizer is missing for a parameter")
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                if value is not None and name != "step":
                    raise ValueError(f"{name} of the optimizer is {str(value)[:40]!r}, expected a tensor")
            elif value.is_complex() and not parameter.is_complex():
                raise ValueError(f"{name} of the optimizer is complex, expected real numbers as the parameter")
            elif value.ndim and value.shape != parameter.shape:
                raise ValueError(
                    f"{name} of the optimizer is {list(value.shape)}, expected {list(parameter.shape)} as the parameter"
                )


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


_OTHER_SHAPES = ("Adafactor", "LBFGS", "SparseAdam")
