"""Rules of SGD, Adam and AdamW on ranges of flat vectors: operations of torch on blocks, or compiled loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.server.accumulator import RunningMean
from paceline.server.blocks import block_like, in_blocks

Array = NDArray[Any]


class StepVectors(NamedTuple):
    """Range of the flat vectors of a step.

    Attributes:
        gradient: gradient [n].
        parameters: parameters [n], changed in place.
        state: vectors of the state of the optimizer, each [n], changed in place.
        copy: vector [n] that gets the new parameters; None for no copy.
    """

    gradient: RunningMean
    parameters: Tensor
    state: Sequence[Tensor]
    copy: Tensor | None

    def split(self, count: int) -> Iterator[StepVectors]:
        """Yield at most this number of parts of about the same length."""
        size = max(1, -(-len(self.parameters) // count))
        for start in range(0, len(self.parameters), size):
            part = slice(start, start + size)
            gradient = self.gradient._replace(vectors=[each[part] for each in self.gradient.vectors])
            copy = None if self.copy is None else self.copy[part]
            yield StepVectors(gradient, self.parameters[part], [each[part] for each in self.state], copy)


class Rule(Protocol):
    """Rule by which an optimizer steps: operations on each element alone."""

    def step(self, vectors: StepVectors) -> None:
        """Step with the operations of torch."""

    def step_compiled(self, vectors: StepVectors, loops: Any) -> None:
        """Step with the compiled loops, with the same bits."""


class BlockRule:
    """Rule that steps block by block, so that a block stays in the cache for all its operations."""

    def step(self, vectors: StepVectors) -> None:
        """Step with the operations of torch."""
        gradient, parameters, state, copy = vectors
        scratch = block_like(parameters)
        copies = parameters if copy is None else copy
        blocks = in_blocks(parameters, copies, *state)
        for mean, (block, copied, *states) in zip(gradient.blocks(), blocks, strict=True):
            self.step_block(block, mean, states, scratch[: len(block)])
            if copy is not None:
                copied.copy_(block)

    def step_block(self, parameters: Tensor, gradient: Tensor, state: Sequence[Tensor], scratch: Tensor) -> None:
        """Step a block; `scratch` has its size, and any content."""


@dataclass(frozen=True)
class SGDRule(BlockRule):
    """Rule of `torch.optim.SGD`, with its momentum if there is any."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> SGDRule:
        """Return the rule of a parameter group."""
        return cls(*(group[name] for name in ("lr", "momentum", "dampening", "nesterov", "weight_decay")))

    def step_block(self, parameters: Tensor, gradient: Tensor, state: Sequence[Tensor], scratch: Tensor) -> None:
        """Step a block."""
        if self.weight_decay:
            gradient = torch.add(gradient, parameters, alpha=self.weight_decay, out=scratch)
        for velocity in state:
            velocity.mul_(self.momentum).add_(gradient, alpha=1 - self.dampening)
            gradient = torch.add(gradient, velocity, alpha=self.momentum, out=scratch) if self.nesterov else velocity
        parameters.add_(gradient, alpha=-self.lr)

    def step_compiled(self, vectors: StepVectors, loops: Any) -> None:
        """Step with the compiled loops."""
        parameters = vectors.parameters.numpy()
        none = parameters[:0]
        velocity = vectors.state[0].numpy() if vectors.state else none
        copy = none if vectors.copy is None else vectors.copy.numpy()
        numbers = [-self.lr, self.momentum, 1 - self.dampening, self.weight_decay, self.nesterov]
        loops.sgd(*_mean_of(vectors), parameters, velocity, copy, np.array(numbers, parameters.dtype))


@dataclass(frozen=True)
class AdamRule(BlockRule):
    """Rule of step number `count` >= 1 of `torch.optim.Adam` or `AdamW`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_decoupled: bool
    count: float

    @classmethod
    def of(cls, group: Mapping[str, Any], count: float) -> AdamRule:
        """Return the rule of a parameter group."""
        is_decoupled = group["decoupled_weight_decay"]
        return cls(group["lr"], *group["betas"], group["eps"], group["weight_decay"], is_decoupled, count)

    def step_block(self, parameters: Tensor, gradient: Tensor, state: Sequence[Tensor], scratch: Tensor) -> None:
        """Step a block."""
        mean, square = state
        if self.weight_decay and self.is_decoupled:
            parameters.mul_(1 - self.lr * self.weight_decay)
        elif self.weight_decay:
            gradient = torch.add(gradient, parameters, alpha=self.weight_decay, out=scratch)
        mean.lerp_(gradient, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        root = torch.sqrt(square, out=scratch).div_(self._root_of_correction).add_(self.eps)
        parameters.addcdiv_(mean, root, value=-self._step_size)

    def step_compiled(self, vectors: StepVectors, loops: Any) -> None:
        """Step with the compiled loops, but for the square root, which torch does not round as a processor does."""
        dtype = vectors.parameters.numpy().dtype
        coupled, decoupled = (0.0, self.weight_decay) if self.is_decoupled else (self.weight_decay, 0.0)
        moments = np.array([1 - self.beta1, self.beta2, 1 - self.beta2, coupled], dtype)
        step = np.array([-self._step_size, self._root_of_correction, self.eps, 1 - self.lr * decoupled], dtype)
        addresses, weights, factor = _mean_of(vectors)
        copies = vectors.parameters if vectors.copy is None else vectors.copy
        scratch = block_like(vectors.parameters)
        for parameters, copy, mean, square in in_blocks(vectors.parameters, copies, *vectors.state):
            w, m, s = (each.numpy() for each in (parameters, mean, square))
            loops.adam_moments(addresses, weights, factor, w, m, s, moments)
            root = torch.sqrt(square, out=scratch[: len(square)]).numpy()
            loops.adam_step(w, m, root, w[:0] if vectors.copy is None else copy.numpy(), step)
            addresses = addresses + w.nbytes

    @property
    def _step_size(self) -> float:
        return self.lr / (1 - self.beta1**self.count)

    @property
    def _root_of_correction(self) -> float:
        return float((1 - self.beta2**self.count) ** 0.5)


class NoRule(BlockRule):
    """Rule of parameters that the optimizer does not hold: they stay as they are."""

    def step_compiled(self, vectors: StepVectors, loops: Any) -> None:
        """Copy."""
        if vectors.copy is not None:
            vectors.copy.copy_(vectors.parameters)


def _mean_of(vectors: StepVectors) -> tuple[Array, Array, Any]:
    """Return the addresses of the vectors of the mean, their weights, and the factor on it."""
    gradient, dtype = vectors.gradient, vectors.parameters.numpy().dtype
    addresses = np.array([each.data_ptr() for each in gradient.vectors], np.int64)
    return addresses, np.array(gradient.weights, dtype), dtype.type(gradient.factor)
