"""Checks of sockets, addresses and the token."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import psutil

from paceline.clusters.job_token import MIN_BITS, estimate_bits
from paceline.clusters.launch_env import TOKEN
from paceline.diagnostics.check import Check, Status

LOOPBACK = "127.0.0.1"
DEADLINE_S = 3.0


def check_loopback() -> Check:
    """Return whether a process can listen on a free port and connect to it on this machine."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection((LOOPBACK, port), timeout=DEADLINE_S):
                return Check(subject="loopback", status=Status.OK, finding=f"connected to port {port} of {LOOPBACK}")
    except OSError as error:
        return Check(
            subject="loopback",
            status=Status.PROBLEM,
            finding=f"cannot connect to a port of {LOOPBACK}: {error.strerror or error}",
            advice="ranks on this machine cannot connect: bring the interface up (ip link set lo up), or allow it in "
            "the firewall; local:N and simulated clusters need no network",
        )


def check_addresses() -> Check:
    """Return the addresses of this machine that other hosts may connect to."""
    families = {socket.AF_INET, socket.AF_INET6}
    addresses = [
        each.address
        for name, found in psutil.net_if_addrs().items()
        if psutil.net_if_stats()[name].isup
        for each in found
        if each.family in families and not each.address.startswith(("127.", "::1", "fe80", "169.254."))
    ]
    return judge_addresses(addresses, has_route=_has_route())


def judge_addresses(addresses: Sequence[str], *, has_route: bool) -> Check:
    """Judge the addresses of the interfaces that are up, without loopback and link-local ones."""
    if not addresses:
        return Check(
            subject="addresses",
            status=Status.WARNING,
            finding="no interface but loopback has an address",
            advice="other hosts cannot take part: connect this machine to their network",
        )
    shown = ", ".join(addresses[:3]) + (", ..." if len(addresses) > 3 else "")
    if not has_route:
        advice = "hosts outside this network cannot be reached: add a route (ip route add default via GATEWAY)"
        return Check(subject="addresses", status=Status.WARNING, finding=f"{shown}; no default route", advice=advice)
    return Check(subject="addresses", status=Status.OK, finding=_several_hosts(shown, addresses[0]))


def _several_hosts(shown: str, address: str) -> str:
    launcher = f"paceline run --nnodes 2 --rdzv-endpoint {address}:29500"
    return f'{shown}; several hosts: {launcher}, with --cluster "torchrun(address={address})"'


def _has_route() -> bool:
    """Return whether the system has a route to other networks; connecting a UDP socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # an address for documentation
        except OSError:
            return False
    return True


def check_token() -> Check:
    """Return whether the secret of jobs on several hosts is set."""
    return judge_token(os.environ)


def judge_token(environment: Mapping[str, str]) -> Check:
    """Judge the environment variable PACELINE_TOKEN."""
    token = environment.get(TOKEN, "")
    make = f"export {TOKEN}=$(paceline token), with the same value on every host"
    bits = estimate_bits(token)
    if not token:
        return Check(
            subject="token",
            status=Status.OK,
            finding=f"{TOKEN} is not set, as needed on one host only; several hosts: {make}",
        )
    if bits < MIN_BITS:
        return Check(
            subject="token",
            status=Status.WARNING,
            finding=f"{TOKEN} has about {bits:.0f} bits: easy to guess",
            advice=make,
        )
    return Check(subject="token", status=Status.OK, finding=f"{TOKEN} has about {bits:.0f} bits")
