"""TCP keepalive for gloo: connections end when the other host was powered off or its cable was cut."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

PROBES = 4


def open_sockets() -> set[int]:
    """Return the inodes of the open sockets of this process."""
    return set(_descriptors())


def published_addresses(store: Any, size: int) -> list[bytes]:
    """Return the listening addresses that the members of a gloo group have put into its store.

    Args:
        store: store of the group, which has formed.
        size: size of the group.
    """
    keys = [f"0/{rank}" for rank in range(size)]
    return [store.get(key) for key in keys] if store.check(keys) else []


def set_keepalive_timeout(before: set[int], timeout_s: float, addresses: Sequence[bytes] = ()) -> None:
    """Make the kernel end every connection of a gloo group whose other host has been silent for some time.

    The kernel probes an idle connection, and also ends one on which data that was sent is not acknowledged.
    gloo has no such setting and does not expose its sockets. They are the new ones that have an end where a member of
    the group listens; other sockets that the process has opened meanwhile stay as they are.

    Args:
        before: result of `open_sockets` before the group formed.
        timeout_s: seconds of silence, >= 1; the kernel counts whole seconds.
        addresses: published addresses of the group; if empty, every new connection counts as gloo's.
    """
    for inode, descriptor in _descriptors().items():
        if inode not in before:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                ends = connection.getpeername(), connection.getsockname()  # a listener has no peer and raises OSError
                if not addresses or any(
                    _sockaddr(connection.family, end) in each for end in ends for each in addresses
                ):
                    _set_options(connection, timeout_s)


def _sockaddr(family: int, end: Any) -> bytes:
    """Return the beginning of an address as struct sockaddr_in, or sockaddr_in6, holds it."""
    host, port, *_ = end
    flow = b"" if family == socket.AF_INET else bytes(4)
    return struct.pack("=H", family) + struct.pack("!H", port) + flow + socket.inet_pton(family, host)


def _set_options(connection: socket.socket, timeout_s: float) -> None:
    idle_s = max(1, int(timeout_s / 2))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int((timeout_s - idle_s) / PROBES)))
    if hasattr(socket, "TCP_KEEPIDLE"):  # macOS has another name for it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


def _descriptors() -> dict[int, int]:
    """Return the descriptors of open sockets by inode."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found
