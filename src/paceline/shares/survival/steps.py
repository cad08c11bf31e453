"""Patches of optimizers, GradScalers and schedules, of which a step may be one that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim.lr_scheduler import LRScheduler

from paceline.shares.survival.surviving_training import SurvivingTraining

Function = Callable[..., Any]


def patch_steps(survival: SurvivingTraining, replace: Callable[[Any, str, Callable[[Any], Any]], None]) -> None:
    """Let steps count only where the survival says so.

    Args:
        survival: survival of this rank.
        replace: function that replaces an attribute by what a function makes of it.
    """

    def optimizer_step(original: Function) -> Function:
        @wraps(original)
        def step(optimizer: torch.optim.Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            if closure is not None:
                survival.give_up("its optimizer takes a closure")
                return original(optimizer, closure, *args, **kwargs)
            return original(optimizer, *args, **kwargs) if survival.takes_step(optimizer) else None

        return _disable_dynamo(step, recursive=False)  # a compiled step leaves it as it is

    def schedule_step(original: Function) -> Function:
        @wraps(original)
        def step(schedule: LRScheduler, *args: Any, **kwargs: Any) -> None:
            if survival.advances:
                original(schedule, *args, **kwargs)

        return step

    def update_of(original: Function) -> Function:
        @wraps(original)
        def update(scaler: Any, *args: Any, **kwargs: Any) -> None:
            if survival.takes_update(scaler):
                original(scaler, *args, **kwargs)
                return
            state = scaler.state_dict()
            original(scaler, *args, **kwargs)  # which also makes it ready for the next step
            scaler.load_state_dict(state)

        return update

    def with_step(patched: Callable[[Function], Function]) -> Callable[[Function], Function]:
        """Return a patch of `__init__` that replaces the method `step` of the class, once."""

        def patch(original: Function) -> Function:
            @wraps(original)
            def init(self: Any, *args: Any, **kwargs: Any) -> None:
                if not hasattr(type(self).step, "is_survived"):
                    replace(type(self), "step", patched)
                    type(self).step.is_survived = True
                original(self, *args, **kwargs)

            return init

        return patch

    replace(torch.optim.Optimizer, "__init__", with_step(optimizer_step))
    replace(LRScheduler, "__init__", with_step(schedule_step))
    replace(torch.amp.GradScaler, "update", update_of)
