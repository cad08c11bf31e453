"""Checks of the launch settings of a rank."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from math import inf
from typing import Any

from paceline.clusters.launch_env import NEW_TOKEN, TO_JOIN, LaunchEnv
from paceline.core.wire import parse_wire
from paceline.errors import UsageError
from paceline.protocols.protocol import Phase, Plan
from paceline.utils.wording import counted

WITHOUT_SERVER: Mapping[str, object] = {  # values of arguments of `Torchrun` that have one value only
    "wire": "float32",
    "shards": 1,
    "standby_sync": False,
}
WITH_GROUPS: Mapping[str, object] = {  # the same for workers of several ranks with a shard each
    "server": False,
    "workers": "process",
    "shards": 1,
    "standby": 0,
    "debug": False,
}
NO_HOST = {*"/[]\0 \t\n"}  # characters in no host name or address


def check_rank(ranks: LaunchEnv, max_workers: int | None) -> None:
    """Check that this rank is one of those that were started, if no others may join."""
    if ranks.rank >= ranks.world_size and max_workers is None:
        raise UsageError(
            f"RANK='{ranks.rank}', expected a whole number >= 0 and <= {ranks.world_size - 1}: ranks are counted from "
            f"0; {TO_JOIN}"
        )


def check_groups(size: int, ranks: LaunchEnv, options: Mapping[str, Any]) -> None:
    """Check that the ranks of a job can form workers of several ranks, each with a shard of the model."""
    if size == 1:
        return
    count = ranks.world_size - ranks.ranks_before
    if count % size:
        raise UsageError(f"group_size={size}, but there are {counted(count, 'rank')}: start a multiple of {size}")
    for name, expected in WITH_GROUPS.items():
        if options[name] != expected:
            raise UsageError(f"{name}={options[name]!r} with group_size={size}, which does not support it: omit {name}")


def check_least_workers(least: int | None, workers: int) -> None:
    """Check that a run has the workers that it is to begin with."""
    if least is not None and least > workers:
        raise UsageError(f"min_workers={least}, but the run has {counted(workers, 'worker')}: give at most {workers}")


def check_most_workers(most: int, ranks: LaunchEnv, *, started: int, worker: int) -> None:
    """Check the number of workers that were started, and that of this process, against `max_workers`."""
    if ranks.sidecar is not None:
        return
    if ranks.rank == 0 and started > most:  # a process that joins later may have another WORLD_SIZE
        raise UsageError(f"max_workers={most}, but {counted(started, 'worker')} were started: give at least {started}")
    if ranks.rank != 0 and worker >= most:
        raise UsageError(
            f"RANK={ranks.rank} is worker {worker}, but max_workers={most} admits 0 to {most - 1}: give every process "
            "a larger max_workers, or this one the RANK of a process that has ended"
        )


def check_without_server(plan: Plan, options: Mapping[str, Any], *, may_be_apart: bool) -> None:
    """Check that every process can be a worker, without a server.

    Args:
        plan: plan of the run.
        options: arguments of the cluster.
        may_be_apart: whether the process of the coordinator need not be a worker: it is the only one, which is a
            worker in any case, or beside the ranks.
    """
    how = "server=False" if plan.allreduce is None else f"{plan} has no server"
    if options["worker_at_server"] is False and not may_be_apart:
        raise UsageError(f"worker_at_server=False: {how}, so every rank is a worker; omit worker_at_server")
    if options["workers"] != "process":
        raise UsageError(
            f"workers={options['workers']!r}: {how}, so every process is a worker; omit workers, or give a protocol "
            "with a server, such as bsp"
        )
    if plan.allreduce is None:
        if reason := why_not_summed(plan, options):
            raise UsageError(reason)
    elif options["wire"] != "float32" and parse_wire(options["wire"]) is None:
        raise UsageError(
            f"wire={options['wire']!r}: {plan} sums in float32, or sends compressed messages; omit wire, or give "
            "wire=int8, int4 or top_k(share=0.01)"
        )


def why_not_summed(plan: Plan, options: Mapping[str, Any]) -> str:
    """Return why the ranks cannot make the updates of a plan by sums of their gradients; an empty text if they can.

    Args:
        plan: plan of the run, of protocols that can have a server.
        options: arguments of the cluster.
    """
    for name, expected in WITHOUT_SERVER.items():
        if options[name] != expected:
            return f"{name}={options[name]!r} with server=False, which does not support it: omit one of them"
    if plan.local_steps is not None:
        return (
            f"{plan} with server=False: local steps are handed in at a server; omit server, or type "
            f"local_sgd(H={plan.local_steps.H or 16})"
        )
    for phase in plan.phases:
        if phase.compensators:
            return f"{phase} with server=False: a gradient is compensated at a server; omit server"
        protocol = phase.protocol
        is_single = protocol.max_staleness > 0 and (protocol.quorum == 1 or protocol.max_lead < inf)
        if is_single or any(each.takes_stale for each in phase.controllers):
            return (
                f"{phase} with server=False: an update of a single stale gradient would cost a sum of all ranks; type "
                f"{_fresh(phase)}, or omit server"
            )
    return ""


def _fresh(phase: Phase) -> str:
    """Return the protocol of fresh gradients that is nearest to that of a phase."""
    for controller in phase.controllers:
        if controller.fresh_form:
            return controller.fresh_form
    protocol = phase.protocol
    if protocol.quorum in ("all", 1) or protocol.max_lead < inf or protocol.max_staleness == 0:
        return "balanced(m=8)"
    return f"k_sync(k={protocol.quorum})" if protocol.refill == "update" else f"k_batch_sync(k={protocol.quorum})"


def check_no_standby(**options: str | bool | None) -> None:
    """Check that a cluster without a standby has no options of one, given by their names."""
    for name, value in options.items():
        if value:
            raise UsageError(f"{name}={value!r} without a standby: give standby=1 too")


def check_standby(plan: Plan, ranks: LaunchEnv, *, address: str | None, shards: int, workers: str) -> None:
    """Check that this plan and launcher can have a standby, and its address.

    Args:
        plan: plan of the run.
        ranks: this rank, and what the launcher has set.
        address: host and port of the standby; None if not given.
        shards: number of parameter servers.
        workers: unit of a worker.
    """
    reasons = {
        f"{plan} has no server": plan.allreduce is not None,
        f"the servers of shards={shards} would need one each": shards > 1,
        "the processes of a worker with workers='node' stay with rank 0": workers == "node",
        "torchrun ends all ranks when one fails, which paceline run does not": ranks.ends_together,
        "the command of the processes cannot be run again": ranks.spawns_sidecars,
        "there is one process only": ranks.world_size == 1,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise UsageError(f"standby=1, but {found[0]}; omit standby")
    if address is not None:
        host_and_port(address)


def check_address(address: str, host: str, port: int | None, ranks: LaunchEnv, *, has_certificate: bool) -> None:
    """Raise a UsageError for an address that is invalid, or that the ranks cannot or may not use.

    Args:
        address: address as it was given.
        host: its host.
        port: its port; None if it has none.
        ranks: this rank, and what the launcher has set.
        has_certificate: whether connections use certificates of an organisation.
    """
    is_host = bool(host) and not NO_HOST & {*host}
    if not is_host or (port is not None and not 1 <= port <= 65535):
        raise UsageError(
            f"address={address!r}: expected a host, or a host and a port from 1 to 65535, as 10.0.0.1, "
            "fd00::1 or 10.0.0.1:29511"
        )
    has_secret = bool(ranks.token) or has_certificate
    if not is_loopback(host):
        if not has_secret:
            raise UsageError(f"address={address!r} is reachable from other machines: {NEW_TOKEN}")
    elif ranks.local_world_size < ranks.world_size and not is_loopback(ranks.master[0]):
        raise UsageError(
            f"the ranks are on several hosts, which cannot reach {address}: give the address of the host of "
            f"rank 0, for example pl.Torchrun(address='{ranks.master[0]}')" + ("" if has_secret else f"; {NEW_TOKEN}")
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
