"""Clusters as they are typed: ``16*exp(mean=1)``, ``local:4``, or a TOML file."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.cluster import Cluster, LocalCluster
from paceline.errors import UsageError, did_you_mean
from paceline.text import Call, bind, split_top
from paceline.timing import Law, Network, ServerTime, Slowdown, Transient, parse_law

_TABLES: Mapping[str, Callable[..., Any]] = {
    "slowdown": Slowdown,
    "transient": Transient,
    "network": Network,
    "server": ServerTime,
}
_FIELDS = {name: {field.name: {} for field in fields(table)} for name, table in _TABLES.items()}  # type: ignore[arg-type]
_SLOWNESS = {"timing": {}, "speed": {}, **_FIELDS}
_CLUSTER = {"workers": {}, **_SLOWNESS}
_LOCAL = {"local": dict.fromkeys(("workers", "device", "respawn", "threads"), {}), "slowness": _SLOWNESS}


def parse_cluster(text: str) -> Cluster | LocalCluster:
    """Read a cluster as it is typed on the command line.

    >>> parse_cluster("4*exp(mean=1) + 4*exp(mean=5)").n
    8
    >>> parse_cluster("local:4")
    LocalCluster(n=4, device='cpu', slowness=None, respawn=False, threads=None)
    """
