"""Hooks around the steps of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline.user_loop.hooks.step_closure import StepArguments


class StepHooks:
    """Hooks before and after each step of one of a loop's optimizers, of which a step within a step is a part.

    Args:
        optimizers: optimizers of the user.
        before: called with the index of the optimizer and the arguments of the step; returns those of the step to make,
            None for the same.
        after: called after the step.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        before: Callable[[int, tuple[Any, ...], dict[str, Any]], StepArguments | None],
        after: Callable[[], None],
    ) -> None:
        self._before = before
        self._after = after
        self._depth = 0  # steps under way: torch gives hooks also to the step of a base class, which a step may call
        self._handles = [
            handle
            for index, optimizer in enumerate(optimizers)
            for handle in (
                optimizer.register_step_pre_hook(partial(self._on_begin, index)),
                optimizer.register_step_post_hook(self._on_end),
            )
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

    def _on_begin(self, index: int, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = self._before(index, args, kwargs) if not self._depth else None
        self._depth += 1  # not if `before` has raised, as then there is no step that could end
        return arguments

    def _on_end(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._after()
