"""Ends connections to hosts that are gone without a word: powered off, or the cable cut."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

PROBES = 4


def sockets() -> set[int]:
    """Return the inodes of the sockets that this process has open."""
    return set(_open_files())


def published(store: Any, size: int) -> list[bytes]:
    """Return what the members of a group of gloo's have told each other in its store: where each of them listens.

    Args:
        store: of the group, which has formed.
        size: of the group.
    """
    keys = [f"0/{place}" for place in range(size)]
    return [store.get(key) for key in keys] if store.check(keys) else []


def end_when_silent(before: set[int], silence_s: float, told: Sequence[bytes] = ()) -> None:
    """Let every connection of a group of gloo's end when nothing has come from its host for some time.

    The kernel asks the other one when nothing else is being said, and gives up too when what was sent is not confirmed.
    gloo has no setting for that, and no way to tell its sockets. So they are found by being new, and by an end where a
    member of the group listens: what else the process has opened meanwhile is let alone.

    Args:
        before: what `sockets` returned before the group was formed.
        silence_s: seconds of silence, >= 1; the kernel counts whole ones.
        told: what is published of the group; if nothing is, every new connection is taken for gloo's.
    """
    for inode, file in _open_files().items():
        if inode not in before:
            with suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
                ends = connection.getpeername(), connection.getsockname()  # no peer: it only listens
                if not told or any(_as_in_c(connection.family, end) in each for end in ends for each in told):
                    _limit(connection, silence_s)


def _as_in_c(family: int, end: Any) -> bytes:
    """Return the beginning of an address as struct sockaddr_in, or sockaddr_in6, has it."""
    host, port, *_ = end
    flow = b"" if family == socket.AF_INET else bytes(4)
    return struct.pack("=H", family) + struct.pack("!H", port) + flow + socket.inet_pton(family, host)


def _limit(connection: socket.socket, silence_s: float) -> None:
    begin_s = max(1, int(silence_s / 2))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int((silence_s - begin_s) / PROBES)))
    if hasattr(socket, "TCP_KEEPIDLE"):  # not where this is called otherwise
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, begin_s)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))


def _open_files() -> dict[int, int]:
    """Return the descriptors of open sockets by inode."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # it was open while the list was made
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found
