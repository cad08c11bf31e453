"""Step of the job's optimizer with a mean gradient: clipping, measurement and the storage of the new version."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan

import torch
from torch import nn

from paceline.core.events import Step
from paceline.core.sharding import FullVector
from paceline.server.accumulator import MeanGradient
from paceline.server.block_optimizer import BlockOptimizer
from paceline.server.step_stats import StepMeter
from paceline.tensors.finite import are_finite
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout, bind
from paceline.tensors.squared_norms import squared_norm_of

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class OptimizerStep:
    """Steps of the optimizer of a parameter server; as in torch, a parameter without a gradient is not stepped.

    Args:
        optimizer: optimizer of the model.
        parameters: parameters of the server, in the order of the layout.
        layout: layout of the model, or of the shard.
        vector: full vector, of which the server may have one shard.
        clip_norm: largest norm of the mean gradient, > 0; None for no limit.

    Attributes:
        is_finite: whether the parameters after the last step are finite.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        layout: FlatLayout,
        vector: FullVector,
        clip_norm: float | None,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._vector = vector
        self._clip_norm = clip_norm
        self.is_finite = True
        self._by_blocks = BlockOptimizer(optimizer, parameters, layout)
        self._meter = StepMeter(optimizer, vector)

    def make(
        self, mean: MeanGradient, state: FlatBuffers, new: FlatBuffers, *, factor: float, measure: bool
    ) -> Step | None:
        """Step the parameters, and return the measured step, None if `measure` is false.

        The parameters of the model are views of the new storage afterwards.

        Args:
            mean: mean gradient.
            state: current parameters, which the parameters of the model are bound to.
            new: storage of the new parameters, which may be that of the current ones.
            factor: factor on the gradient, > 0.
            measure: whether the step is measured.
        """
        learning_rate = max_learning_rate(self._optimizer)
        squared_norm = nan
        if measure or self._clip_norm is not None:
            scale(mean.whole, factor)
            [squared_norm] = self._vector.summed([squared_norm_of(mean.whole.flat_parameters)])
            factor = 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (squared_norm**0.5 + CLIP_EPSILON))
        if measure:
            scale(mean.whole, factor)
            factor = 1.0
            self._meter.before(state.flat_parameters)
        check = self._by_blocks.step(mean, state, new, factor)
        if new is not state:
            bind(self._parameters, new.parameters)
        if check is None:
            if new is not state:
                new.copy_(state)
            scale(mean.whole, factor)
            self._step_whole(mean)
        self.is_finite = (check is not None and isfinite(check)) or are_finite(new.flat_parameters)
        if not measure:
            return None
        return self._meter.after(new.flat_parameters, mean.whole.flat_parameters, squared_norm, learning_rate)

    def _step_whole(self, mean: MeanGradient) -> None:
        flats = mean.whole.flat_parameters
        for i, (parameter, gradient) in enumerate(zip(self._parameters, mean.whole.parameters, strict=True)):
            parameter.grad = gradient if i in mean.written else None
        before = [flat._version for flat in flats]
        self._optimizer.step()
        if before != [flat._version for flat in flats] and mean.is_borrowed:
            for flat in flats:  # the optimizer wrote into a worker's gradient: the worker expects zeros in the
                flat.zero_()  # parameters that it has not written itself


def max_learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the largest learning rate of all parameter groups; that of the first may be 0, to freeze it."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def scale(gradient: FlatBuffers, factor: float) -> None:
    """Multiply the parameters of a gradient by a factor."""
    if factor != 1.0:
        for flat in gradient.flat_parameters:
            flat.mul_(factor)
