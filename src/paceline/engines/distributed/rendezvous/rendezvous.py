"""Rendezvous of a job's processes at rank 0 and at the shard servers, in the TCP store of rank 0."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed.rendezvous.handshake import check_signed_end
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost, dist
from paceline.errors import RunError, UsageError

STORE_TIMEOUT = timedelta(seconds=20)
POLL_S = 0.1
PEER_COUNT = "peers"
OPEN = "open"  # set when a server polls for peers
ENDED = "ended"  # set when the run has ended, to its `SignedEnd`
ADDRESS = "paceline/address"  # of rank 0, in the store of torchrun's agents, who may count restarts differently


class Endpoint(NamedTuple):
    """Address at which a server can be reached: a store, or the part of it that belongs to a shard.

    Attributes:
        address: host and port of the store.
        device: gloo device on this host's address towards it.
        shard: number of the shard whose server is reached; 0 for the owner of the store.
    """

    address: tuple[str, int]
    device: Any
    shard: int = 0

    def client(self) -> Any:
        """Return a new connection to the store; a blocking call on a connection blocks all its users."""
        store = dist.TCPStore(*self.address, None, False, STORE_TIMEOUT, wait_for_workers=False)
        return dist.PrefixStore(f"shard/{self.shard}", store) if self.shard else store


class Rendezvous:
    """Server side of the rendezvous: finds the processes that want to join.

    Args:
        endpoint: endpoint of this server.
        keepalive_timeout_s: seconds without any answer from a host after which its connections end.
        store: connection to the store; None opens a new one.
    """

    def __init__(self, endpoint: Endpoint, keepalive_timeout_s: float, store: Any = None) -> None:
        self.endpoint = endpoint
        self._keepalive_timeout_s = keepalive_timeout_s
        self._store = store or endpoint.client()
        self._last_peer_id = 0
        self._announced: list[int] = []  # ids that were drawn by processes which are not ready yet
        self._store.set(OPEN, "open")

    @classmethod
    def listen(cls, host: str, port: int = 0, name: str | None = None, *, keepalive_timeout_s: float) -> Rendezvous:
        """Return a rendezvous in a new store on an address of this host.

        Args:
            host: address to listen on.
            port: port to listen on; 0 for a free one.
            name: address by which others reach this host, if it is another one.
            keepalive_timeout_s: as above.

        Raises:
            UsageError: the address is not this host's, or its port is in use.
        """
        listener = _listen(host, port)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host, port, None, True, STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        name = name or host
        endpoint = Endpoint((name, port), dist.ProcessGroupGloo.create_device(hostname=name))
        return cls(endpoint, keepalive_timeout_s, store)

    def accept(self, peer_id: int) -> Connection:
        """Return the connection to a process that wants to join.

        Raises:
            ConnectionLost: the process has gone.
        """
        return Connection(
            self.endpoint.client(), _connection_key(peer_id), 0, self.endpoint.device, self._keepalive_timeout_s
        )

    def publish_end(self, signed_end: str) -> None:
        """Publish the end of the run to processes that come from now on."""
        self._store.set(ENDED, signed_end)

    def new_peers(self) -> list[int]:
        """Return the ids of the processes that have come since the last call."""
        count = self._store.add(PEER_COUNT, 0)
        self._announced += range(self._last_peer_id + 1, count + 1)
        self._last_peer_id = count
        ready = [peer_id for peer_id in self._announced if self._store.check([_ready_key(peer_id)])]
        self._announced = [peer_id for peer_id in self._announced if peer_id not in ready]
        return ready


def listen_as_rank_0(cluster: Torchrun) -> Rendezvous:
    """Return the rendezvous of rank 0, on the address that the user has given, where every rank finds it.

    Raises:
        UsageError: the address is not this host's, or its port is in use.
    """
    ranks = cluster.ranks
    name = ranks.master[0] if cluster.host == "0.0.0.0" else None
    port = cluster.port or (0 if ranks.has_agent else ranks.master[1])
    rendezvous = Rendezvous.listen(cluster.host, port, name, keepalive_timeout_s=cluster.silence_s)
    if ranks.has_agent:
        _agents_store(cluster).set(ADDRESS, "{}:{}".format(*rendezvous.endpoint.address))
    return rendezvous


def join(endpoint: Endpoint, cluster: Torchrun) -> tuple[int, Connection]:
    """Connect to the server at an endpoint; return the id of this process there, and the connection.

    Args:
        endpoint: endpoint of the server.
        cluster: launch settings, with the time to wait for a server that starts later than its store.

    Raises:
        ConnectionLost: the server does not answer.
        RunFinished: the run has ended.
    """
    try:
        store = endpoint.client()
        store.wait([OPEN], timedelta(seconds=cluster.start_timeout_s))
        _check_end(store, cluster)
        peer_id = int(store.add(PEER_COUNT, 1))
        store.set(_ready_key(peer_id), "ready")
        _check_end(store, cluster)  # if the run has not ended yet, the server's last poll finds this id
    except RuntimeError as error:
        server = f"the server of slice {endpoint.shard}" if endpoint.shard else "rank 0"
        raise ConnectionLost("{} does not answer at {}:{}".format(server, *endpoint.address)) from error
    return peer_id, Connection(store, _connection_key(peer_id), 1, endpoint.device, cluster.silence_s)


def _check_end(store: Any, cluster: Torchrun) -> None:
    if store.check([ENDED]):
        check_signed_end(store.get(ENDED).decode(), cluster.ranks.token)


def reach(address: tuple[str, int]) -> Endpoint | None:
    """Return the endpoint at an address, None if no process listens there."""
    local_address = _local_address_towards(address)
    return Endpoint(address, dist.ProcessGroupGloo.create_device(hostname=local_address)) if local_address else None


def find_rank_0(cluster: Torchrun) -> Endpoint:
    """Wait for rank 0 and return its endpoint.

    Raises:
        RunError: rank 0 cannot be reached within the start timeout.
    """
    deadline_s = time.monotonic() + cluster.start_timeout_s
    while True:
        address = _address(cluster)
        if address is not None and (endpoint := reach(address)):
            return endpoint
        if time.monotonic() > deadline_s:
            where = "{}:{}".format(*address) if address else "{}:{}".format(*cluster.ranks.master)
            raise RunError(
                f"rank 0 could not be reached at {where} within start_timeout_s={cluster.start_timeout_s:g}; "
                "if it runs on another host, give its address, as pl.Torchrun(address=...)"
            )
        time.sleep(POLL_S)


def is_restart(cluster: Torchrun, what: str) -> bool:
    """Record that rank 0 begins a run, and return whether this job of torchrun had begun it before.

    torchrun counts only restarts after failures. The store of its agents also outlives a restart after a node has
    joined or left.

    Args:
        cluster: launch settings of this process.
        what: name of the run.
    """
    if not cluster.ranks.has_agent:
        return cluster.ranks.restarts > 0
    times = int(_agents_store(cluster).add(f"paceline/begun/{what}", 1))
    return cluster.ranks.restarts > 0 or times > 1


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


def _address(cluster: Torchrun) -> tuple[str, int] | None:
    """Return the address on which rank 0 listens, None if it is not known yet."""
    ranks = cluster.ranks
    host, port = ranks.master
    if cluster.port is not None:
        return (cluster.host if cluster.host != "0.0.0.0" else host), cluster.port
    if not ranks.has_agent:
        return host, port
    if not _local_address_towards(ranks.master):
        return None
    with suppress(RuntimeError):
        store = _agents_store(cluster)
        if store.check([ADDRESS]):
            host, _, text = store.get(ADDRESS).decode().rpartition(":")
            return host, int(text)
    return None


def _local_address_towards(address: tuple[str, int]) -> str | None:
    """Return this host's own address on the route to another one, None if no process listens there."""
    try:
        with socket.create_connection(address, timeout=2.0) as connection:
            return str(connection.getsockname()[0])
    except OSError:
        return None


def _agents_store(cluster: Torchrun) -> Any:
    return dist.TCPStore(*cluster.ranks.master, None, False, STORE_TIMEOUT, wait_for_workers=False)


def _ready_key(peer_id: int) -> str:
    return f"ready/{peer_id}"


def _connection_key(peer_id: int) -> str:
    """Return the store key of the connection between a server and a peer."""
    return f"connection/{peer_id}"
