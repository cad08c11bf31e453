"""How far an update moves the parameters, and how far along its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.events import Step


class StepMeter:
    """Measures the step of an optimizer from before to after.

    Plain SGD of all parameters, whose step is its gradient times the learning rate, is not measured but computed,
    which needs no copy of the parameters. An optimizer that writes into the gradient makes the measured inner product
    that of what it left there.

    Args:
        optimizer: that will step.
        parameters: flat vectors, which its step moves.

    Attributes:
        parameters: where they lie now.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self.parameters = parameters
        self._before: list[Tensor] = []
        self._squared_norm = 0.0

    def before(self, gradient: Sequence[Tensor]) -> None:
        """Look at the mean gradient, which is not clipped yet, and at the parameters."""
        self._squared_norm = _squared_norm(gradient)
        if not self._is_plain_sgd():
            self._before = self._before or [torch.empty_like(flat) for flat in self.parameters]
            for copy, flat in zip(self._before, self.parameters, strict=True):
                copy.copy_(flat)

    def after(self, gradient: Sequence[Tensor], learning_rate: float) -> Step:
        """Return the step; a schedule has yet to say what the next learning rate is.

        Args:
            gradient: the same mean gradient, clipped by now if the job clips.
            learning_rate: that it stepped with.
        """
        squared_norm = self._squared_norm
        clipped_norm = _squared_norm(gradient)
        shrunk = (clipped_norm / squared_norm) ** 0.5 if squared_norm else 1.0
        if self._is_plain_sgd():
            progress = learning_rate * squared_norm * shrunk
            squared_step = learning_rate * learning_rate * clipped_norm  # ** raises where this is inf
        else:
            steps = [copy.sub_(flat) for copy, flat in zip(self._before, self.parameters, strict=True)]
            along = sum(_dot(piece, step) for piece, step in zip(gradient, steps, strict=True))
            progress = along / shrunk if shrunk else 0.0
            squared_step = _squared_norm(steps)
        return Step(squared_norm, progress, squared_step, learning_rate, learning_rate)

    def _is_plain_sgd(self) -> bool:
        if type(self._optimizer) is not torch.optim.SGD:
            return False
        groups = self._optimizer.param_groups
        one_rate = len({float(group["lr"]) for group in groups}) == 1
        moved = sum(parameter.numel() for group in groups for parameter in group["params"])
        moves_all = moved == sum(flat.numel() for flat in self.parameters)
        return (
            one_rate
            and moves_all
            and not any(group[option] for group in groups for option in ("momentum", "weight_decay", "maximize"))
        )


def _squared_norm(flats: Sequence[Tensor]) -> float:
    norms = [float(torch.linalg.vector_norm(flat, dtype=torch.float64)) for flat in flats]
    return sum(norm * norm for norm in norms)


def _dot(one: Tensor, other: Tensor) -> float:
    is_half = one.dtype.itemsize < torch.float32.itemsize
    return float(torch.dot(one.float(), other.float()) if is_half else torch.dot(one, other))
