"""Transport: how the processes of a job reach each other, and what they exchange messages over."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.gloo import CONNECT_TIMEOUT_S, dist, gloo_group
from paceline.engines.distributed.transport.gloo_connection import GlooConnection
from paceline.errors import UsageError

STORE_TIMEOUT = timedelta(seconds=20)


class Endpoint(NamedTuple):
    """Address at which a server can be reached: a store, or the part of it that belongs to a shard.

    Attributes:
        transport: transport to the server.
        address: host and port of the store.
        device: gloo device on this host's address towards it.
        shard: number of the shard whose server is reached; 0 for the owner of the store.
    """

    transport: Transport
    address: tuple[str, int]
    device: Any
    shard: int = 0

    def client(self) -> Any:
        """Return a new connection to the store; a blocking call on a connection blocks all its users."""
        store = self.transport.store(self.address)
        return dist.PrefixStore(f"shard/{self.shard}", store) if self.shard else store


class Transport(Protocol):
    """Factory of the connections and of the groups of one process.

    Attributes:
        keepalive_timeout_s: seconds without any answer from a host after which its connections end, >= 1.
        poll_s: interval in seconds between two checks of a store.
    """

    keepalive_timeout_s: float
    poll_s: float

    def listen(self, host: str, port: int = 0, name: str | None = None) -> tuple[Endpoint, Any]:
        """Return the endpoint of a new store on an address of this host, and the store.

        Args:
            host: address to listen on.
            port: port to listen on; 0 for a free one.
            name: address by which others reach this host, if it is another one.

        Raises:
            UsageError: the address is not this host's, or its port is in use.
        """

    def reach(self, address: tuple[str, int]) -> Endpoint | None:
        """Return the endpoint at an address, None if no process listens there."""

    def store(self, address: tuple[str, int]) -> Any:
        """Return a new connection to the store at an address."""

    def connect(self, endpoint: Endpoint, key: str, side: int) -> Connection:
        """Connect the server at an endpoint and a peer.

        Args:
            endpoint: endpoint of the server, at both sides.
            key: key that only these two use.
            side: 0 for the server, 1 for the peer.

        Raises:
            ConnectionLost: the other process did not connect.
        """

    def group(
        self, store: Any, rank: int, size: int, device: Any, *, timeout_s: float = CONNECT_TIMEOUT_S, threads: int = 1
    ) -> Any:
        """Return a process group for sums; the arguments are those of `gloo_group`.

        Raises:
            RuntimeError: a process did not connect.
        """


class GlooTransport(Transport):
    """Transport on gloo, whose processes meet in TCP stores.

    Args:
        keepalive_timeout_s: seconds without any answer from a host after which its connections end, >= 1.
    """

    poll_s = 0.1

    def __init__(self, keepalive_timeout_s: float) -> None:
        self.keepalive_timeout_s = keepalive_timeout_s

    def listen(self, host: str, port: int = 0, name: str | None = None) -> tuple[Endpoint, Any]:
        """Return the endpoint of a new TCP store, and the store."""
        listener = _listen(host, port)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host, port, None, True, STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return self._endpoint((name or host, port), name or host), store

    def reach(self, address: tuple[str, int]) -> Endpoint | None:
        """Return the endpoint at an address, with this host's own address on the route to it."""
        with suppress(OSError), socket.create_connection(address, timeout=2.0) as connection:
            return self._endpoint(address, connection.getsockname()[0])
        return None

    def store(self, address: tuple[str, int]) -> Any:
        """Return a client of the TCP store at an address."""
        return dist.TCPStore(*address, None, False, STORE_TIMEOUT, wait_for_workers=False)

    def connect(self, endpoint: Endpoint, key: str, side: int) -> Connection:
        """Connect two processes through the store of the endpoint."""
        return GlooConnection(endpoint.client(), key, side, endpoint.device, self.keepalive_timeout_s)

    def group(
        self, store: Any, rank: int, size: int, device: Any, *, timeout_s: float = CONNECT_TIMEOUT_S, threads: int = 1
    ) -> Any:
        """Return a process group on gloo."""
        limits = {"keepalive_timeout_s": self.keepalive_timeout_s, "timeout_s": timeout_s}
        return gloo_group(store, rank, size, device, threads=threads, **limits)

    def _endpoint(self, address: tuple[str, int], local_address: str) -> Endpoint:
        return Endpoint(self, address, dist.ProcessGroupGloo.create_device(hostname=local_address))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        where = f"{host}:{port}" if port else host
        raise UsageError(
            f"cannot listen on {where} ({error.strerror}); give an address of this host and a free port, as "
            f"pl.Torchrun(address='{host}:29511')"
        ) from None
    return listener
