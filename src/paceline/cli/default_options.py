"""Protocol, cluster and stop condition of `paceline train` where the command line names none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.clusters.parser import parse_cluster

LOCAL, TORCHRUN = "local:2", "torchrun"
STOPS = {"digits": "loss=0.5,epochs=10"}  # by job; no stop condition suits every job


def default_options(options: Mapping[str, Any], *, under_torchrun: bool) -> dict[str, str]:
    """Return the options that a new run needs and that were not given.

    The cluster is two processes of this machine, or the ranks that torchrun has started. The protocol waits for all
    workers but one. A stop condition is known for built-in jobs only.

    Args:
        options: options of the command; None for one that was not given.
        under_torchrun: whether torchrun has started this process.

    >>> typed = {"job": "digits", "protocol": None, "cluster": "8*exp(mean=1)", "stop": None}
    >>> default_options(typed, under_torchrun=False)
    {'protocol': 'k_sync(k=7)', 'stop': 'loss=0.5,epochs=10'}
    """
    cluster = options["cluster"] or (TORCHRUN if under_torchrun else LOCAL)
    chosen = {"protocol": f"k_sync(k={max(1, parse_cluster(cluster).n - 1)})", "cluster": cluster}
    if options["job"] in STOPS:
        chosen["stop"] = STOPS[options["job"]]
    return {name: value for name, value in chosen.items() if options[name] is None}
