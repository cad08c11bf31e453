"""Store of `paceline run`, as its ranks reach it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from paceline.clusters.launch_env import LaunchEnv, started_by_torchrun

TIMEOUT = timedelta(seconds=60)


def has_launcher_store(environment: Mapping[str, str]) -> bool:
    """Return whether `paceline run` has started a process with these variables."""
    if not started_by_torchrun(environment):
        return False
    launch = LaunchEnv.from_environment(environment)
    return launch.keeps_ranks and launch.has_agent


def launcher_store(environment: Mapping[str, str]) -> Any:
    """Return a client of the store of `paceline run`.

    Args:
        environment: variables of a process for which `has_launcher_store` holds.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = LaunchEnv.from_environment(environment).master
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
