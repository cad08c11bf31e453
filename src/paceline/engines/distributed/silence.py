"""Ends connections to hosts that are gone without a word: powered off, or the cable cut."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

PROBES = 4


def sockets() -> set[int]:
    """Return the inodes of the sockets that this process has open."""
    return set(_open_files())


def end_when_silent(before: set[int], silence_s: float) -> None:
    """Let every TCP connection made since then end when nothing has come from its host for some time.

    The kernel asks the other one when nothing else is being said, and gives up too when what was sent is not confirmed.
    gloo's pairs have no setting for that, and no way to tell their sockets, so they are found by being new.

    Args:
        before: what `sockets` returned before the connections were made.
        silence_s: seconds of silence, >= 1; the kernel counts whole ones.
    """
    for inode, file in _open_files().items():
        if inode not in before:
            with suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
                connection.getpeername()  # else it only listens
                _limit(connection, silence_s)


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
