"""Connection to the ranks that have the shards of one replica, which get the same messages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.messages import Message


class GroupConnection:
    """Connections to all ranks of one worker, over which the coordinator sends messages as over one.

    Args:
        connections: connections in the order of the shards, one or more.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    @property
    def local_host(self) -> str:
        """Address of this host at which the rank with the first shard reaches it."""
        return self._connections[0].local_host

    def send(self, message: Message, buckets: Sequence[tuple[int, Tensor]] = ()) -> None:
        """Send a message to all ranks."""
        for each in self._connections:
            each.send(message, buckets)

    def close(self) -> None:
        """Close all connections."""
        for each in self._connections:
            each.close()
