"""How far an update moves the parameters, and how far along its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.events import Step
from paceline.core.sharding import FullVector


class StepMeter:
    """Measures the step of an optimizer from before to after.

    Plain SGD of all parameters, whose step is its gradient times the learning rate, is not measured but computed,
    which needs no copy of the parameters. An optimizer that writes into the gradient makes the measured inner product
    that of what it left there.

    Args:
        optimizer: that will step.
        parameters: flat vectors, which its step moves.
        whole: of which these may be a slice.

    Attributes:
        parameters: where they lie now.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], whole: FullVector) -> None:
        self._optimizer = optimizer
        self.parameters = parameters
        self._whole = whole
        self._before: list[Tensor] = []

    def before(self) -> None:
        """Look at the parameters."""
        if not self._is_plain_sgd():
            self._before = self._before or [torch.empty_like(flat) for flat in self.parameters]
            for copy, flat in zip(self._before, self.parameters, strict=True):
                copy.copy_(flat)

    def after(self, gradient: Sequence[Tensor], squared_norm: float, learning_rate: float) -> Step:
        """Return the step; a schedule has yet to say what the next learning rate is.

        Args:
            gradient: the mean gradient, clipped by now if the job clips.
            squared_norm: of the whole gradient, before that.
            learning_rate: that it stepped with.
        """
        is_plain = self._is_plain_sgd()
        shares = [squared_norm_of(gradient), *([] if is_plain else self._moved_along(gradient))]
        clipped_norm, *moved = self._whole.summed(shares)
        shrunk = (clipped_norm / squared_norm) ** 0.5 if squared_norm else 1.0
        if is_plain:
            progress = learning_rate * squared_norm * shrunk
            squared_step = learning_rate * learning_rate * clipped_norm  # ** raises where this is inf
        else:
            along, squared_step = moved
            progress = along / shrunk if shrunk else 0.0
        return Step(squared_norm, progress, squared_step, learning_rate, learning_rate)

    def _moved_along(self, gradient: Sequence[Tensor]) -> tuple[float, float]:
        """Return g.s and ||s||^2."""
        steps = [copy.sub_(flat) for copy, flat in zip(self._before, self.parameters, strict=True)]
        along = sum(_dot(piece, step) for piece, step in zip(gradient, steps, strict=True))
        return along, squared_norm_of(steps)

    def _is_plain_sgd(self) -> bool:
        if type(self._optimizer) is not torch.optim.SGD:
            return False
        groups = self._optimizer.param_groups
        one_rate = len({float(group["lr"]) for group in groups}) == 1
        moved = sum(parameter.numel() for group in groups for parameter in group["params"])
        moves_all = moved == self._whole.elements
        return (
            one_rate
            and moves_all
            and not any(group[option] for group in groups for option in ("momentum", "weight_decay", "maximize"))
        )


def squared_norm_of(flats: Sequence[Tensor]) -> float:
    """Return ||v||^2 of a vector that lies in several parts, worked out in double precision."""
    norms = [float(torch.linalg.vector_norm(flat, dtype=torch.float64)) for flat in flats]
    return sum(norm * norm for norm in norms)


def _dot(one: Tensor, other: Tensor) -> float:
    is_half = one.dtype.itemsize < torch.float32.itemsize
    return float(torch.dot(one.float(), other.float()) if is_half else torch.dot(one, other))
