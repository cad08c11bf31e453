"""Attached run whose loop really steps: the user's optimizer, with the gradient that the worker's thread gives it."""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.tensors.flat_buffers import bind
from paceline.user_loop.attached_run import AttachedRun
from paceline.user_loop.loop_replica import LoopEnd, LoopStep, LoopTask
from paceline.user_loop.step_closure import StepArguments


class SteppingRun(AttachedRun):
    """Part of one rank in a run in which the optimizer of each rank steps.

    During the run the parameters are views of the flat memory of the worker. The gradient is handed in before the
    user's step; the step is made with the gradient that the worker gives back. Its arguments are those of
    `AttachedRun`.
    """

    _makes_step = False  # whether the step under way has the gradient that the worker gave back
    _depth = 0  # calls of `step` under way: torch gives hooks also to the step of a base class, which a step may call

    def _share_state(self) -> None:
        """Leave the state to the optimizer of this rank, which steps."""

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        """Hand in the gradient, and wait for that of the step; without one the step finds none."""
        if self._depth:
            self._depth += 1
            return None
        arguments = super()._before_step(args, kwargs)
        message = self._get()
        self._makes_step = isinstance(message, LoopStep)
        if not self._makes_step:  # the gradient is not finite, or the task begins anew
            self._on_message(message)
        self._depth = 1
        return arguments

    def _after_step(self) -> None:
        self._depth -= 1
        if self._makes_step and not self._depth:
            self._makes_step = False
            self._exchange.to_worker.put(LoopStep())
            self._receive()

    def _on_message(self, message: LoopTask | LoopStep | LoopEnd | BaseException) -> None:
        try:
            super()._on_message(message)
        finally:
            if self.over:
                # Memory of their own, so that files of some parameters do not contain the rest.
                bind(self._watch.parameters, [parameter.data.clone() for parameter in self._watch.parameters])

    def _load(self, model: nn.Module) -> None:
        self._watch.bind(model)
