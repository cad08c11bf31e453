"""Access to the loops that numba compiles, and the threads that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

LEAST = 2**18  # elements; fewer are computed before the loops are loaded
TRIED = 5_003  # elements of the vectors on which the loops are compared with torch

Part = TypeVar("Part")
Result = TypeVar("Result")


@cache
def loops_for(dtype: torch.dtype) -> Any | None:
    """Return the compiled loops; None if numba is not installed, or has no such dtype."""
    if dtype not in (torch.float32, torch.float64):
        return None
    try:
        from paceline.tensors import compiled
    except ImportError:
        return None
    return compiled


def in_threads(act: Callable[[Part], Result], parts: Iterable[Part]) -> list[Result]:
    """Return the results of a function that runs compiled loops for each part, in as many threads as torch uses."""
    threads = torch.get_num_threads()
    return list(_pool(threads).map(act, parts) if threads > 1 else map(act, parts))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)
