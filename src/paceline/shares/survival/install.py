"""Mark of a script whose ranks train in a process group of torch, which no rank can leave."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from paceline.clusters.launch_env import BOUND
from paceline.shares.survival.launcher_store import launcher_store

OWNERS = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")


def tell_launcher_of_groups() -> None:
    """Arrange that the launcher knows when this rank joins the process group of all ranks."""
    original: Callable[..., Any] = sys.modules[OWNERS[1]].init_process_group
    for owner in map(sys.modules.get, OWNERS):
        if getattr(owner, "init_process_group", None) is original:
            setattr(owner, "init_process_group", _telling(original))  # noqa: B010  # of a module


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        store = launcher_store(os.environ)
        if store is not None:
            store.set(BOUND, "1")
        return original(*args, **kwargs)

    return init_process_group
