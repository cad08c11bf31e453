"""Rendezvous of a job's processes at rank 0 and at the shard servers, in the TCP store of rank 0."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed.rendezvous.handshake import check_signed_end
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.transport import Endpoint, Transport
from paceline.errors import RunError

PEER_COUNT = "peers"
OPEN = "open"  # set when a server polls for peers
ENDED = "ended"  # set when the run has ended, to its `SignedEnd`
ADDRESS = "paceline/address"  # of rank 0, in the store of torchrun's agents, who may count restarts differently


class Rendezvous:
    """Server side of the rendezvous: finds the processes that want to join.

    Args:
        endpoint: endpoint of this server.
        store: connection to the store; None opens a new one.

    Attributes:
        endpoint: as given.
        poll_s: interval in seconds between two searches for new processes.
    """

    def __init__(self, endpoint: Endpoint, store: Any = None) -> None:
        self.endpoint = endpoint
        self.poll_s = endpoint.transport.poll_s
        self._store = store or endpoint.client()
        self._last_peer_id = 0
        self._announced: list[int] = []  # ids that were drawn by processes which are not ready yet
        self._store.set(OPEN, "open")

    def accept(self, peer_id: int) -> Connection:
        """Return the connection to a process that wants to join.

        Raises:
            ConnectionLost: the process has gone.
        """
        return self.endpoint.transport.connect(self.endpoint, _connection_key(peer_id), side=0)

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


def listen_as_rank_0(cluster: Torchrun, transport: Transport) -> Rendezvous:
    """Return the rendezvous of rank 0, on the address that the user has given, where every rank finds it.

    Raises:
        UsageError: the address is not this host's, or its port is in use.
    """
    ranks = cluster.ranks
    name = ranks.master[0] if cluster.host == "0.0.0.0" else None
    port = cluster.port or (0 if ranks.has_agent else ranks.master[1])
    rendezvous = Rendezvous(*transport.listen(cluster.host, port, name))
    if ranks.has_agent:
        transport.store(ranks.master).set(ADDRESS, "{}:{}".format(*rendezvous.endpoint.address))
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
        server = f"the server of shard {endpoint.shard}" if endpoint.shard else "rank 0"
        raise ConnectionLost("{} does not answer at {}:{}".format(server, *endpoint.address)) from error
    return peer_id, endpoint.transport.connect(endpoint, _connection_key(peer_id), side=1)


def _check_end(store: Any, cluster: Torchrun) -> None:
    if store.check([ENDED]):
        check_signed_end(store.get(ENDED).decode(), cluster.ranks.token)


def find_rank_0(cluster: Torchrun, transport: Transport) -> Endpoint:
    """Wait for rank 0 and return its endpoint.

    Raises:
        RunError: rank 0 cannot be reached within the start timeout.
    """
    deadline_s = time.monotonic() + cluster.start_timeout_s
    while True:
        address = _address(cluster, transport)
        if address is not None and (endpoint := transport.reach(address)):
            return endpoint
        if time.monotonic() > deadline_s:
            where = "{}:{}".format(*address) if address else "{}:{}".format(*cluster.ranks.master)
            raise RunError(
                f"rank 0 could not be reached at {where} within start_timeout_s={cluster.start_timeout_s:g}; "
                "if it runs on another host, give its address, as pl.Torchrun(address=...)"
            )
        time.sleep(transport.poll_s)


def is_restart(cluster: Torchrun, transport: Transport, what: str) -> bool:
    """Record that rank 0 begins a run, and return whether this job of torchrun had begun it before.

    torchrun counts only restarts after failures. The store of its agents also outlives a restart after a node has
    joined or left.

    Args:
        cluster: launch settings of this process.
        transport: transport to the store of torchrun's agents.
        what: name of the run.
    """
    if not cluster.ranks.has_agent:
        return cluster.ranks.restarts > 0
    times = int(transport.store(cluster.ranks.master).add(f"paceline/begun/{what}", 1))
    return cluster.ranks.restarts > 0 or times > 1


def _address(cluster: Torchrun, transport: Transport) -> tuple[str, int] | None:
    """Return the address on which rank 0 listens, None if it is not known yet."""
    ranks = cluster.ranks
    host, port = ranks.master
    if cluster.port is not None:
        return (cluster.host if cluster.host != "0.0.0.0" else host), cluster.port
    if not ranks.has_agent:
        return host, port
    if not transport.reach(ranks.master):
        return None
    with suppress(RuntimeError):
        store = transport.store(ranks.master)
        if store.check([ADDRESS]):
            host, _, text = store.get(ADDRESS).decode().rpartition(":")
            return host, int(text)
    return None


def _ready_key(peer_id: int) -> str:
    return f"ready/{peer_id}"


def _connection_key(peer_id: int) -> str:
    """Return the store key of the connection between a server and a peer."""
    return f"connection/{peer_id}"
