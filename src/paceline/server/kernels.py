"""Choice of the arithmetic of a step: operations of torch on blocks, or compiled loops that have the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from paceline.server.accumulator import RunningMean
from paceline.server.optimizer_rules import AdamRule, Rule, SGDRule, StepVectors
from paceline.tensors.compiled_loops import LEAST, TRIED, in_threads, loops_for, when_loaded
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


def step(rule: Rule, vectors: StepVectors) -> float:
    """Step by a rule, in the fastest way that has the bits of torch.

    Args:
        rule: rule of the optimizer.
        vectors: vectors of the step.

    Returns:
        Number that is finite only if all new parameters are.
    """
    parameters = vectors.parameters
    loops = loops_of(type(rule), parameters, len(parameters))
    if loops is None:
        return rule.step(vectors)
    length = -(-len(parameters) // torch.get_num_threads())
    return sum(in_threads(partial(rule.step_compiled, loops=loops), vectors.parts(length)))


def loops_of(kind: type[Rule], parameter: Tensor, length: int) -> Any | None:
    """Return the compiled loops for a rule, which begin to load at the first call; None if torch has to step.

    Args:
        kind: kind of the rule.
        parameter: parameter in the vectors.
        length: length of the vectors, >= 0.
    """
    has_loops = length >= LEAST and parameter.device.type == "cpu"
    return when_loaded(exact_loops, kind, parameter.dtype) if has_loops else None


@cache
def exact_loops(kind: type[Rule], dtype: torch.dtype) -> Any | None:
    """Return the compiled loops if they have the bits of torch; None if they do not, or if numba is not installed.

    Processors without fused multiply-add, and other builds of torch, may round differently.

    Args:
        kind: kind of the rule.
        dtype: dtype of the vectors.
    """
    compiled = loops_for(dtype)
    for rule, in_place in product(_rules(kind), (False, True)) if compiled is not None else ():
        by_torch, by_loops = (_tried(dtype, rule, in_place) for _ in range(2))
        rule.step(by_torch)
        rule.step_compiled(by_loops, compiled)
        if not all(map(torch.equal, _changed(by_torch), _changed(by_loops))):
            LOG.warning("the compiled loops of numba differ from torch for %s in %r: torch is used", dtype, rule)
            return None
    return compiled


def _rules(kind: type[Rule]) -> Iterator[Rule]:
    """Yield a rule for each way through the loops."""
    if kind is SGDRule:
        yield SGDRule(lr=0.1)
        yield SGDRule(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1)
        yield SGDRule(lr=0.1, momentum=0.9, nesterov=True)
    else:
        yield AdamRule(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, is_decoupled=False, count=3)
        yield AdamRule(lr=0.01, beta1=0.4, beta2=0.95, eps=1e-6, weight_decay=0.1, is_decoupled=False, count=1)
        yield AdamRule(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, is_decoupled=True, count=1_000)


def _tried(dtype: torch.dtype, rule: Rule, in_place: bool) -> StepVectors:
    """Return vectors that are the same for each call."""
    random = torch.Generator().manual_seed(0)
    first, second, third, parameters, one, other = (torch.randn(TRIED, generator=random, dtype=dtype) for _ in range(6))
    gradient = RunningMean([first, second, third], [1.0, 0.7, 0.2], 0.3)
    state = [one, other.abs_()] if isinstance(rule, AdamRule) else [one] if getattr(rule, "momentum", 0.0) else []
    return StepVectors(
        gradient=gradient,
        parameters=parameters,
        new=parameters if in_place else torch.empty_like(parameters),
        state=state,
    )


def _changed(vectors: StepVectors) -> list[Tensor]:
    return [vectors.new, *vectors.state]
