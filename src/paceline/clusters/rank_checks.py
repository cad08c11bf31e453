"""Checks of the launch settings of a rank."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from paceline.clusters.launch_env import NEW_TOKEN, TO_JOIN
from paceline.errors import UsageError
from paceline.protocols.protocol import Plan
from paceline.utils.wording import counted

if TYPE_CHECKING:
    from paceline.clusters.torchrun import Torchrun

NO_HOST = {*"/[]\0 \t\n"}  # characters in no host name or address


def check_rank(cluster: Torchrun) -> None:
    """Check that this rank is one of those that were started, if no others may join."""
    rank, world_size = cluster.ranks.rank, cluster.ranks.world_size
    if rank >= world_size and cluster.max_workers is None:
        raise UsageError(
            f"RANK='{rank}', expected a whole number >= 0 and <= {world_size - 1}: ranks are counted from 0; {TO_JOIN}"
        )


def check_workers(cluster: Torchrun) -> None:
    """Check the number of workers that were started, and that of this process, against `max_workers`."""
    least, most = cluster.min_workers, cluster.n
    if least is not None and least > most:
        raise UsageError(f"min_workers={least}, but the run has {counted(most, 'worker')}: give at most {most}")
    if cluster.max_workers is None or cluster.ranks.sidecar is not None:
        return
    if cluster.is_server and cluster.started > most:  # a process that joins later may have another WORLD_SIZE
        raise UsageError(
            f"max_workers={most}, but {counted(cluster.started, 'worker')} were started: give at least "
            f"{cluster.started}"
        )
    if not cluster.is_server and cluster.worker >= most:
        raise UsageError(
            f"RANK={cluster.ranks.rank} is worker {cluster.worker}, but max_workers={most} admits 0 to {most - 1}: "
            "give every process a larger max_workers, or this one the RANK of a process that has ended"
        )


def check_standby(cluster: Torchrun, plan: Plan) -> None:
    """Raise a UsageError if a standby is asked for that this plan or launcher cannot have."""
    if not cluster.standby:
        for name, default in {"standby_address": None, "standby_sync": False}.items():
            if (given := getattr(cluster, name)) != default:
                raise UsageError(f"{name}={given!r} without a standby: give standby=1 too")
        return
    reasons = {
        f"{plan} has no server": plan.allreduce is not None,
        f"the servers of shards={cluster.shards} would need one each": cluster.shards > 1,
        "the processes of a worker with workers='node' stay with rank 0": cluster.workers == "node",
        "torchrun ends all ranks when one fails, which paceline run does not": cluster.ranks.ends_together,
        "the command of the processes cannot be run again": cluster.ranks.spawns_sidecars,
        "there is one process only": cluster.ranks.world_size == 1,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise UsageError(f"standby=1, but {found[0]}; omit standby")
    if cluster.standby_address is not None:
        host_and_port(cluster.standby_address)


def check_address(cluster: Torchrun) -> None:
    """Raise a UsageError for an address that is invalid, or that the ranks cannot or may not use."""
    is_host = bool(cluster.host) and not NO_HOST & {*cluster.host}
    if not is_host or (cluster.port is not None and not 1 <= cluster.port <= 65535):
        raise UsageError(
            f"address={cluster.address!r}: expected a host, or a host and a port from 1 to 65535, as 10.0.0.1, "
            "fd00::1 or 10.0.0.1:29511"
        )
    has_secret = bool(cluster.ranks.token) or cluster.tls_cert is not None
    if not is_loopback(cluster.host):
        if not has_secret:
            raise UsageError(f"address={cluster.address!r} is reachable from other machines: {NEW_TOKEN}")
    elif cluster.ranks.local_world_size < cluster.ranks.world_size and not is_loopback(cluster.ranks.master[0]):
        raise UsageError(
            f"the ranks are on several hosts, which cannot reach {cluster.address}: give the address of the host of "
            f"rank 0, for example pl.Torchrun(address='{cluster.ranks.master[0]}')"
            + ("" if has_secret else f"; {NEW_TOKEN}")
        )


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host and the port of an address.

    Raises:
        UsageError: one of them is missing or invalid.
    """
    host, _, port = address.rpartition(":")
    if not host or NO_HOST & {*host} or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UsageError(f"standby_address={address!r}: expected a host and a port from 1 to 65535, as 10.0.0.2:29501")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether a host address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
