"""Process groups on gloo: their creation, their end, and the errors of their operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from paceline.engines.distributed.transport.connection import ConnectionLost

dist: Any = distributed  # it does not export the types of all its names

CONNECT_TIMEOUT_S = 20.0
NO_TIMEOUT = timedelta(days=365)  # gloo closes a pair on which a receive has timed out
IMMEDIATELY = timedelta(milliseconds=1)
PROBE_TAG = 1


def gloo_group(
    store: Any,
    rank: int,
    size: int,
    host: str,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    threads: int = 1,
) -> Any:
    """Return a process group on gloo.

    Args:
        store: store in which exactly the processes of the group meet.
        rank: rank of this process in the group, from 0.
        size: number of processes.
        host: address of this host, which the other processes can reach.
        timeout_s: longest wait for each action of another process, in seconds.
        threads: threads that carry out the operations.

    Raises:
        RuntimeError: a process did not connect.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = threads
    return dist.ProcessGroupGloo(store, rank, size, options)


def disconnect_pair(group: Any, peer: int) -> None:
    """Close the connection to one process of a group now; pending operations fail on both sides. Thread-safe."""
    with suppress(RuntimeError):  # gloo closes a pair on which a wait has timed out, and in no other way
        post_probe(group, peer).wait(IMMEDIATELY)


def post_probe(group: Any, peer: int) -> Any:
    """Post a receive that no process answers.

    Raises:
        RuntimeError: the two processes are no longer connected.
    """
    return group.recv([torch.zeros(1)], peer, PROBE_TAG)


@contextmanager
def raising_connection_lost() -> Iterator[None]:
    """Raise ConnectionLost where gloo raises any error."""
    try:
        yield
    except RuntimeError as error:  # torch raises several subclasses
        raise ConnectionLost(shorten(str(error))) from error


def shorten(reason: str) -> str:
    """Return an error message of gloo without its source position and without advice."""
    text = reason.rpartition("] ")[2] if reason.startswith("[/") else reason
    return text.partition(". This is")[0].partition("\n")[0]
