"""Arithmetic of delay compensation in compiled loops."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.policies.compensation.base import AdaptiveKnobs
from paceline.tensors.compiled_loops import LEAST, TRIED, loops_for
from paceline.tensors.stale_arithmetic import BlockArithmetic, Corrected, StaleArithmetic
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


def stale_arithmetic(vectors: Sequence[Tensor]) -> StaleArithmetic:
    """Return the arithmetic of delay compensation for such vectors."""
    serves = all(len(each) >= LEAST and each.device.type == "cpu" for each in vectors)
    return (serves and _compiled_arithmetic(tuple({each.dtype for each in vectors}))) or BlockArithmetic()


@cache
def _compiled_arithmetic(dtypes: Collection[torch.dtype]) -> CompiledArithmetic | None:
    loops = [loops_for(dtype) for dtype in dtypes]
    for compiled, dtype in zip(loops, dtypes, strict=True):
        if compiled is None:
            return None
        ours, theirs = (_tried(arithmetic, dtype) for arithmetic in (CompiledArithmetic(compiled), BlockArithmetic()))
        if not all(map(torch.equal, ours, theirs)):
            LOG.warning("the compiled loops of numba differ from torch for %s in corrections: torch is used", dtype)
            return None
    return CompiledArithmetic(loops[0]) if loops else None


def _tried(arithmetic: StaleArithmetic, dtype: torch.dtype) -> list[Tensor]:
    """Return what two corrections make of vectors that are the same for each call."""
    random = torch.Generator().manual_seed(0)
    g, now, then, mean_square = (torch.randn(TRIED, generator=random, dtype=dtype) for _ in range(4))
    arithmetic.correct(g, now, then, 0.3)
    arithmetic.correct_adaptively(g, now, then, mean_square.abs_(), AdaptiveKnobs(m=0.9, epsilon=1e-7, lambda0=0.3))
    return [g, mean_square]


class CompiledArithmetic:
    """Arithmetic of delay compensation in compiled loops.

    Args:
        loops: compiled loops.
    """

    name = "numba"

    def __init__(self, loops: Any) -> None:
        self._loops = loops

    def squared_distance(self, now: Tensor, then: Tensor) -> float:
        """Return ||D||^2."""
        return float(self._loops.squared_distance(now.numpy(), then.numpy()))

    def squared_length(self, gradient: Tensor, now: Tensor, then: Tensor, scale: float) -> float:
        """Return ||scale g g D||^2."""
        g, a, b = gradient.numpy(), now.numpy(), then.numpy()
        return float(self._loops.squared_length(g, a, b, g.dtype.type(scale)))

    def correct(self, gradient: Tensor, now: Tensor, then: Tensor, lambda_: float) -> Corrected:
        """Add lambda g g D to g in place."""
        g, a, b = gradient.numpy(), now.numpy(), then.numpy()
        return Corrected(*self._loops.correct(g, a, b, g.dtype.type(lambda_)))

    def correct_adaptively(
        self, gradient: Tensor, now: Tensor, then: Tensor, mean_square: Tensor, knobs: AdaptiveKnobs
    ) -> Corrected:
        """Count g in the mean square, and add the adaptive correction to g in place."""
        numbers = torch.tensor([knobs.m, 1 - knobs.m, knobs.epsilon, knobs.lambda0], dtype=gradient.dtype)
        vectors = (gradient, now, then, mean_square, numbers)
        return Corrected(*self._loops.correct_adaptively(*(each.numpy() for each in vectors)))
