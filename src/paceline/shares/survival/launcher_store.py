"""Store of `paceline run`, as its ranks reach it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from paceline.clusters.launch_env import LaunchEnv, started_by_torchrun

TIMEOUT = timedelta(seconds=60)


def launcher_store(environment: Mapping[str, str]) -> Any:
    """Return a client of the store of `paceline run`; None in a process that it has not started.

    Args:
        environment: variables of this process.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if not started_by_torchrun(environment):
        return None
    launch = LaunchEnv.from_environment(environment)
    if not (launch.keeps_ranks and launch.has_agent):
        return None
    host, port = launch.master
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
