"""Hooks around the steps of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.user_loop.hooks.step_closure import StepArguments


class StepHooks:
    """Hooks before and after each step of an optimizer, of which a step within a step is a part.

    Args:
        optimizer: optimizer of the user.
        before: called with the arguments of the step; returns those of the step to make, None for the same.
        after: called after the step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Callable[[tuple[Any, ...], dict[str, Any]], StepArguments | None],
        after: Callable[[], None],
    ) -> None:
        self._before = before
        self._after = after
        self._depth = 0  # steps under way: torch gives hooks also to the step of a base class, which a step may call
        self._handles = [
            optimizer.register_step_pre_hook(self._on_begin),
            optimizer.register_step_post_hook(self._on_end),
        ]

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not ended: it is under way, or it has raised an error."""
        return self._depth > 0

    @contextmanager
    def off(self) -> Iterator[None]:
        """Return a block whose steps call nothing."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _on_begin(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = self._before(args, kwargs) if not self._depth else None
        self._depth += 1  # not if `before` has raised, as then there is no step that could end
        return arguments

    def _on_end(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._after()
