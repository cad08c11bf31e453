"""Patches of collectives: the time of a rank stands still in them, and the sizes of their tensors are compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.shares.balancer import Balancer
from paceline.shares.marks import COLLECTIVES
from paceline.shares.refusals import Refusing

Function = Callable[..., Any]
FindBalancer = Callable[[], Balancer | None]
FSDP = (
    "torch.distributed.fsdp.",
    "torch.distributed._composable.fsdp.",
)  # gathers parameters, of which sizes are known
# Collectives whose tensors need the same size on all ranks, with the place of the rank's own ones.
EQUAL_SIZES = {
    **dict.fromkeys(("all_gather", "all_gather_into_tensor", "all_gather_single"), 1),
    **dict.fromkeys(("all_to_all", "all_to_all_single"), 1),
    **dict.fromkeys(("all_reduce", "broadcast", "gather", "reduce"), 0),
}


def patch_collectives(find_balancer: FindBalancer, replace: Callable[[Any, str, Callable[[Any], Any]], None]) -> None:
    """Patch the functions by which a script waits for other ranks.

    Args:
        find_balancer: returns the balancer of this rank; None without one.
        replace: function that replaces an attribute by what a function makes of it.
    """
    replace(DistributedDataParallel, "_sync_buffers", partial(_paused, find_balancer))
    for name in COLLECTIVES:
        replace(dist, name, partial(_paused, find_balancer))
    for name, at in EQUAL_SIZES.items():
        replace(dist, name, partial(_with_sizes, find_balancer, at))
    replace(dist.Work, "wait", partial(_paused, find_balancer))


def _with_sizes(find_balancer: FindBalancer, at: int, original: Function) -> Function:
    """Return a collective that compares the sizes of its tensors on the ranks first."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        balancer = find_balancer()
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        group = kwargs.get("group", next((each for each in args if isinstance(each, dist.ProcessGroup)), None))
        is_exempt = torch.compiler.is_compiling() or caller.startswith(FSDP) or _has_split_sizes(args, kwargs)
        if balancer is not None and not is_exempt and dist.get_world_size(group) == balancer.ranks:
            given = args[at] if len(args) > at else next(iter(kwargs.values()), None)
            tensors = [given] if isinstance(given, torch.Tensor) else list(given or [])
            if any(each.ndim for each in tensors):  # a single number has no size that a share could change
                with Refusing():
                    balancer.check_sizes(original.__name__, [each.numel() for each in tensors])
        return original(*args, **kwargs)

    return call


def _has_split_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a script tells itself how many values go to each rank."""
    lists = [each for each in args[2:] if isinstance(each, Sequence)]
    return any("split_sizes" in name for name in kwargs) or any(isinstance(each, int) for each in chain(*lists))


def _paused(find_balancer: FindBalancer, original: Function) -> Function:
    """Return a function during which the time of this rank stands still."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        balancer = find_balancer()
        if balancer is None or torch.compiler.is_compiling() or not balancer.stopwatch.is_running:
            return original(*args, **kwargs)
        balancer.stopwatch.stop()
        try:
            return original(*args, **kwargs)
        finally:
            balancer.stopwatch.start()

    return call
