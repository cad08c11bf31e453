"""Access to the loops that numba compiles, the thread that loads them, and those that run them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

LEAST = 2**18  # elements; fewer are computed before the loops are called
TRIED = 5_003  # elements of the vectors on which the loops are compared with torch

Part = TypeVar("Part")
Result = TypeVar("Result")
_loads: dict[Hashable, Future[Any]] = {}  # by function and arguments


def when_loaded(load: Callable[..., Any], *arguments: Hashable) -> Any | None:
    """Return the loops that a function loads; None until a thread has called it.

    The import of numba takes half a second. Training does not wait for it, as torch has the same bits.
    """
    if (load, arguments) not in _loads:
        loader = ThreadPoolExecutor(1, "paceline-loops")
        _loads[load, arguments] = loader.submit(load, *arguments)
        loader.shutdown(wait=False)
    loaded = _loads[load, arguments]
    return loaded.result() if loaded.done() else None


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
