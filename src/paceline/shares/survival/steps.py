"""Patches of steps that may change nothing, of optimizers, GradScalers and schedules, and of the meshes of FSDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from paceline.shares.survival.surviving_training import SurvivingTraining

Function = Callable[..., Any]
Replace = Callable[[Any, str, Callable[[Any], Any]], None]


def patch_steps(survival: SurvivingTraining, replace: Replace) -> None:
    """Let steps count only where the survival says so.

    Args:
        survival: survival of this rank.
        replace: function that replaces an attribute by what a function makes of it.
    """
    replace(DistributedDataParallel, "_sync_buffers", partial(_with_any_root, survival))
    replace(torch.amp.GradScaler, "update", partial(_scaler_update, survival))
    for owner, patched in ((torch.optim.Optimizer, _optimizer_step), (LRScheduler, _schedule_step)):
        replace(owner, "__init__", partial(_with_step, replace, partial(patched, survival)))


def patch_meshes(survival: SurvivingTraining, common: Any, replace: Replace) -> None:
    """Let FSDP shard modules over groups that live on, where the survival has them.

    Args:
        survival: survival of this rank.
        common: module of torch that has FSDP's meshes.
        replace: function that replaces an attribute by what a function makes of it.
    """
    replace(common.FSDPMeshInfo, "__post_init__", partial(_mesh_made, survival))


def _mesh_made(survival: SurvivingTraining, original: Function) -> Function:
    @wraps(original)
    def post_init(mesh: Any) -> None:
        original(mesh)
        survival.before_sharding(mesh)

    return post_init


def _with_step(replace: Replace, patched: Callable[[Function], Function], original: Function) -> Function:
    """Return a function `__init__` that replaces the method `step` of the class, once."""

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(type(self).step, "is_survived"):
            replace(type(self), "step", patched)
            type(self).step.is_survived = True
        original(self, *args, **kwargs)

    return init


def _optimizer_step(survival: SurvivingTraining, original: Function) -> Function:
    @wraps(original)
    def step(optimizer: torch.optim.Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        if closure is not None:
            survival.give_up("its optimizer takes a closure")
            return original(optimizer, closure, *args, **kwargs)
        result = original(optimizer, *args, **kwargs) if survival.takes_step(optimizer) else None
        survival.after_step(is_last=not survival.scales)
        return result

    return _disable_dynamo(step, recursive=False)  # a compiled step leaves it as it is


def _schedule_step(survival: SurvivingTraining, original: Function) -> Function:
    @wraps(original)
    def step(schedule: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if survival.advances:
            original(schedule, *args, **kwargs)

    return step


def _scaler_update(survival: SurvivingTraining, original: Function) -> Function:
    @wraps(original)
    def update(scaler: Any, *args: Any, **kwargs: Any) -> None:
        is_taken, state = survival.takes_update(scaler), scaler.state_dict()
        original(scaler, *args, **kwargs)  # which also makes it ready for the next step
        if not is_taken:
            scaler.load_state_dict(state)
        survival.after_step(is_last=True)

    return update


def _with_any_root(survival: SurvivingTraining, original: Function) -> Function:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with survival.taking_any_root():
            return original(*args, **kwargs)

    return call
