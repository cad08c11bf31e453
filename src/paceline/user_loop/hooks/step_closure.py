"""Closure of `optimizer.step(closure)`, which is called before the step so that its gradient can be handed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import RunError

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


def call_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
    """Call the closure among the arguments of a step; return the arguments with its value in its place.

    Args:
        args: positional arguments of the step, of which the first is the optimizer.
        kwargs: keyword arguments of the step.

    Returns:
        Arguments of the step to make, None if there is no closure.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad():
        replaced = _computed(closure())
    if len(args) > 1:
        return (args[0], replaced, *args[2:]), kwargs
    return args, {**kwargs, "closure": replaced}


def _computed(value: Any) -> Callable[[], Any]:
    """Return a closure that returns a value once.

    Raises:
        RunError: the optimizer calls it again.
    """
    values = [value]

    def closure() -> Any:
        if not values:
            raise RunError(
                "the optimizer calls the closure again within a step, but a step has one gradient: give an optimizer "
                "that calls it once"
            )
        return values.pop()

    return closure
