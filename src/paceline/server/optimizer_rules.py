"""Rules of SGD, Adam and AdamW on ranges of flat vectors: operations of torch on blocks, or compiled loops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.server.accumulator import RunningMean
from paceline.tensors.blocks import block_length, block_like, in_blocks
from paceline.tensors.finite import check_sum

ROOTS = 2**18  # elements between two calls of torch for square roots: a call costs more than the last-level cache


class StepVectors(NamedTuple):
    """Range of the flat vectors of a step.

    Attributes:
        gradient: gradient [n].
        parameters: parameters [n].
        new: vector [n] that gets the new parameters; that of the parameters for a step in place.
        state: vectors of the state of the optimizer, each [n], changed in place.
    """

    gradient: RunningMean
    parameters: Tensor
    new: Tensor
    state: Sequence[Tensor]

    def parts(self, length: int) -> Iterator[StepVectors]:
        """Yield parts of this length; the last one may be shorter."""
        for start in range(0, len(self.parameters), length):
            part = slice(start, start + length)
            gradient = self.gradient._replace(vectors=[each[part] for each in self.gradient.vectors])
            parameters = self.parameters[part]
            new = parameters if self.is_in_place else self.new[part]
            yield StepVectors(
                gradient=gradient, parameters=parameters, new=new, state=[each[part] for each in self.state]
            )

    @property
    def is_in_place(self) -> bool:
        """Whether the parameters themselves are changed."""
        return self.new is self.parameters

    def arrays(self, most: int) -> Iterator[tuple[Any, ...]]:
        """Yield the vectors, the weights and the factor of the gradient; and parameters, new ones and state, as arrays.

        If the gradient has more vectors, the mean of the first ones is computed in blocks. For a step in place, the
        array of the new parameters is [0]: the loops are slow if two of their arrays are the same.
        """
        few = len(self.gradient.vectors) <= most
        for part in [self] if few else self.parts(block_length()):
            vectors, weights, factor = part.gradient.of_vectors(most)
            parameters = part.parameters.numpy()
            new = np.empty(0, parameters.dtype) if part.is_in_place else part.new.numpy()
            filled = np.array([*weights, *[0.0] * (most - len(weights))], parameters.dtype)
            gradient = (tuple(each.numpy() for each in vectors), filled, parameters.dtype.type(factor))
            yield (gradient, parameters, new, *(each.numpy() for each in part.state))


class Rule(ABC):
    """Rule by which an optimizer steps: operations on each element alone."""

    def step(self, vectors: StepVectors) -> float:
        """Step with the operations of torch, block by block, so that a block stays in the cache for all of them.

        Returns:
            Number that is finite only if all new parameters are, as `check_sum`.
        """
        gradient, parameters, new, state = vectors
        scratch = block_like(parameters)
        checks = []
        blocks = in_blocks(*[parameters, new, *state])
        for mean, (old_block, new_block, *states) in zip(gradient.blocks(), blocks, strict=True):
            self.step_block(old_block, new_block, mean, states, scratch[: len(old_block)])
            checks.append(check_sum(new_block))
        return float(torch.stack(checks).sum())

    @abstractmethod
    def step_block(self, old: Tensor, new: Tensor, gradient: Tensor, state: Sequence[Tensor], scratch: Tensor) -> None:
        """Step a block; `new` may be `old`, and `scratch` has its size, and any content."""

    @abstractmethod
    def step_compiled(self, vectors: StepVectors, loops: Any) -> float:
        """Step with the compiled loops, with the same bits; return such a number."""


@dataclass(frozen=True, kw_only=True)
class SGDRule(Rule):
    """Rule of `torch.optim.SGD`, with its momentum if there is any."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> SGDRule:
        """Return the rule of a parameter group."""
        return cls(**{name: group[name] for name in ("lr", "momentum", "dampening", "nesterov", "weight_decay")})

    def step_block(self, old: Tensor, new: Tensor, gradient: Tensor, state: Sequence[Tensor], scratch: Tensor) -> None:
        """Step a block."""
        if self.weight_decay:
            gradient = torch.add(gradient, old, alpha=self.weight_decay, out=scratch)
        for velocity in state:
            velocity.mul_(self.momentum).add_(gradient, alpha=1 - self.dampening)
            gradient = torch.add(gradient, velocity, alpha=self.momentum, out=scratch) if self.nesterov else velocity
        torch.add(old, gradient, alpha=-self.lr, out=new)

    def step_compiled(self, vectors: StepVectors, loops: Any) -> float:
        """Step with the compiled loops."""
        check = 0.0
        numbers = [-self.lr, self.momentum, 1 - self.dampening, self.weight_decay, self.nesterov]
        step = loops.sgd_in_place if vectors.is_in_place else loops.sgd
        for (means, weights, factor), parameters, new, *state in vectors.arrays(loops.VECTORS):
            check += step(
                vectors=means,
                weights=weights,
                factor=factor,
                parameters=parameters,
                new=new,
                velocity=state[0] if state else np.empty(0, parameters.dtype),
                numbers=np.array(numbers, parameters.dtype),
            )
        return check


@dataclass(frozen=True, kw_only=True)
class AdamRule(Rule):
    """Rule of step number `count` >= 1 of `torch.optim.Adam` or `AdamW`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_decoupled: bool
    count: float

    @classmethod
    def of(cls, group: Mapping[str, Any], count: float, *, is_adamw: bool) -> AdamRule:
        """Return the rule of a parameter group."""
        beta1, beta2 = group["betas"]
        is_decoupled = group.get("decoupled_weight_decay", is_adamw)  # no option before torch 2.6
        return cls(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            is_decoupled=is_decoupled,
            count=count,
        )

    def step_block(self, old: Tensor, new: Tensor, gradient: Tensor, state: Sequence[Tensor], scratch: Tensor) -> None:
        """Step a block."""
        mean, square = state
        if self.weight_decay and self.is_decoupled:
            old = torch.mul(old, 1 - self.lr * self.weight_decay, out=new)
        elif self.weight_decay:
            gradient = torch.add(gradient, old, alpha=self.weight_decay, out=scratch)
        mean.lerp_(gradient, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        root = torch.sqrt(square, out=scratch).div_(self._root_of_correction).add_(self.eps)
        torch.addcdiv(old, mean, root, value=-self._step_size, out=new)

    def step_compiled(self, vectors: StepVectors, loops: Any) -> float:
        """Step with the compiled loops, but for the square root, which torch does not round as a processor does."""
        check = 0.0
        coupled, decoupled = (0.0, self.weight_decay) if self.is_decoupled else (self.weight_decay, 0.0)
        moments = [1 - self.beta1, self.beta2, 1 - self.beta2, coupled]
        step = [-self._step_size, self._root_of_correction, self.eps, 1 - self.lr * decoupled]
        root = torch.empty(min(ROOTS, len(vectors.parameters)), dtype=vectors.parameters.dtype)
        for (means, weights, factor), *whole in vectors.arrays(loops.VECTORS):
            dtype = whole[0].dtype
            for start in range(0, len(whole[0]), ROOTS):
                part = slice(start, start + ROOTS)
                parameters, new, mean, square = (each[part] for each in whole)
                loops.adam_moments(
                    vectors=tuple(each[part] for each in means),
                    weights=weights,
                    factor=factor,
                    parameters=parameters,
                    mean=mean,
                    square=square,
                    numbers=np.array(moments, dtype),
                )
                torch.sqrt(torch.from_numpy(square), out=root[: len(square)])
                check += loops.adam_step(parameters, new, mean, root.numpy(), np.array(step, dtype))
        return check

    @property
    def _step_size(self) -> float:
        return float(self.lr / (1 - self.beta1**self.count))

    @property
    def _root_of_correction(self) -> float:
        return float((1 - self.beta2**self.count) ** 0.5)
