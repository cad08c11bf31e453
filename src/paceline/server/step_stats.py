"""Step statistics: how far an update moves the parameters, and how far along its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.events import Step
from paceline.core.sharding import FullVector
from paceline.tensors.squared_norms import squared_norm_of


class StepMeter:
    """Measurement of an optimizer's step, from a copy of the parameters made before it.

    The step of plain SGD over all parameters is the gradient times the learning rate: it is computed, without a copy.
    If an optimizer writes into the gradient, the measured inner product uses the overwritten gradient.

    Args:
        optimizer: optimizer whose steps are measured.
        vector: full vector, of which the measured parameters may be one shard.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, vector: FullVector) -> None:
        self._optimizer = optimizer
        self._vector = vector
        self._before: list[Tensor] = []

    def before(self, parameters: Sequence[Tensor]) -> None:
        """Copy the flat vectors that the next step moves, unless the step can be computed."""
        if not self._is_plain_sgd():
            self._before = self._before or [torch.empty_like(flat) for flat in parameters]
            for copy, flat in zip(self._before, parameters, strict=True):
                copy.copy_(flat)

    def after(
        self, parameters: Sequence[Tensor], gradient: Sequence[Tensor], squared_norm: float, learning_rate: float
    ) -> Step:
        """Return the step; its next learning rate is filled in after the schedule has advanced.

        Args:
            parameters: flat vectors of the new parameters.
            gradient: mean gradient, after clipping.
            squared_norm: squared norm of the full gradient before clipping, >= 0.
            learning_rate: learning rate of the step, >= 0.
        """
        is_plain = self._is_plain_sgd()
        shares = [squared_norm_of(gradient), *([] if is_plain else self._moved_along(parameters, gradient))]
        clipped_norm, *moved = self._vector.summed(shares)
        shrunk = (clipped_norm / squared_norm) ** 0.5 if squared_norm else 1.0
        if is_plain:
            progress = learning_rate * squared_norm * shrunk
            squared_step = learning_rate * learning_rate * clipped_norm  # ** raises where this is inf
        else:
            along, squared_step = moved
            progress = along / shrunk if shrunk else 0.0
        return Step(
            squared_norm=squared_norm,
            progress=progress,
            squared_step=squared_step,
            learning_rate=learning_rate,
            next_learning_rate=learning_rate,
        )

    def _moved_along(self, parameters: Sequence[Tensor], gradient: Sequence[Tensor]) -> tuple[float, float]:
        """Return g.s and ||s||^2."""
        steps = [copy.sub_(flat) for copy, flat in zip(self._before, parameters, strict=True)]
        along = sum(_dot(piece, step) for piece, step in zip(gradient, steps, strict=True))
        return along, squared_norm_of(steps)

    def _is_plain_sgd(self) -> bool:
        if type(self._optimizer) is not torch.optim.SGD:
            return False
        groups = self._optimizer.param_groups
        one_rate = len({float(group["lr"]) for group in groups}) == 1
        moved = sum(parameter.numel() for group in groups for parameter in group["params"])
        moves_all = moved == self._vector.elements
        return (
            one_rate
            and moves_all
            and not any(group[option] for group in groups for option in ("momentum", "weight_decay", "maximize"))
        )


def _dot(one: Tensor, other: Tensor) -> float:
    is_half = one.dtype.itemsize < torch.float32.itemsize
    return float(torch.dot(one.float(), other.float()) if is_half else torch.dot(one, other))
