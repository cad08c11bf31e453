"""Weak calls: hooks of a run that do not keep it alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

import torch

from paceline.errors import RunError
from paceline.user_loop.step_closure import StepArguments

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls a method of a run without keeping the run alive.

    The function raises a RunError if the run was dropped, but its hooks are still called.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        alive = reference()
        if alive is None:
            raise RunError("the run of this optimizer was dropped: keep what pl.attach returns until the training ends")
        return alive(*args, **kwargs)

    return call


def hook_steps(
    hooks: ExitStack,
    optimizer: torch.optim.Optimizer,
    before: Callable[[tuple[Any, ...], dict[str, Any]], StepArguments | None],
    after: Callable[[], None],
) -> None:
    """Call functions before and after each step of an optimizer.

    Args:
        hooks: stack whose end removes the hooks.
        optimizer: optimizer of the user.
        before: called with the arguments of the step; returns those of the step to make.
        after: called after the step.
    """
    pre = optimizer.register_step_pre_hook(lambda _, args, kwargs: before(args, kwargs))
    post = optimizer.register_step_post_hook(lambda *_: after())
    hooks.callback(pre.remove)
    hooks.callback(post.remove)
