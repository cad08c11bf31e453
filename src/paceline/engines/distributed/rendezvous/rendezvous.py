"""Where the processes of a job find rank 0 and the servers of slices: rank 0's store, and the tickets drawn there."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed.rendezvous.handshake import check_notice
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost, dist
from paceline.errors import RunError, UsageError

TIMEOUT = timedelta(seconds=20)
LOOK_AGAIN_S = 0.1
TICKETS = "tickets"
OPEN = "open"  # set when tickets are looked at
OVER = "over"  # set when the run has ended, to its notice
ADDRESS = "paceline/address"  # of rank 0, in the store of torchrun's agents, who may count restarts differently


class Endpoint(NamedTuple):
    """A store, or the part of it that is a slice's, as this process reaches it.

    Attributes:
        address: host and port of the store.
        device: gloo's, on the address of this host that is next to it.
        slice: whose server can be met there; 0 for whoever has the store.
    """

    address: tuple[str, int]
    device: Any
    slice: int = 0

    def client(self) -> Any:
        """Return another connection to the store: whoever waits at one keeps all others from it."""
        store = dist.TCPStore(*self.address, None, False, TIMEOUT, wait_for_workers=False)
        return dist.PrefixStore(f"slice/{self.slice}", store) if self.slice else store


class Rendezvous:
    """Where processes come that want to take part.

    Args:
        place: where.
        silence_s: seconds after which a host that does not answer any more is taken for gone.
        store: a connection of its own, if it is not to be another client.
    """

    def __init__(self, place: Endpoint, silence_s: float, store: Any = None) -> None:
        self.place = place
        self._silence_s = silence_s
        self._store = store or place.client()
        self._met = 0  # tickets drawn, of those that are known
        self._drawn: list[int] = []  # whose holders have not said that they are there
        self._store.set(OPEN, "open")

    @classmethod
    def on(cls, host: str, port: int = 0, name: str | None = None, *, silence_s: float) -> Rendezvous:
        """Return one in a new store on an address of this host.

        Args:
            host: to listen on.
            port: likewise; 0 for a free one.
            name: by which others reach this host, if not by that.
            silence_s: as above.

        Raises:
            UsageError: the address is not this host's, or its port is in use.
        """
        listener = _listen(host, port)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        name = name or host
        return cls(Endpoint((name, port), dist.ProcessGroupGloo.create_device(hostname=name)), silence_s, store)

    def line(self, ticket: int) -> Connection:
        """Wait for the holder of a ticket and return the line to it.

        Raises:
            Broken: it has not stayed.
        """
        return Connection(self.place.client(), _pair_key(ticket), 0, self.place.device, self._silence_s)

    def announce_end(self, notice: str) -> None:
        """Publish the end of the run to processes that come from now on."""
        self._store.set(OVER, notice)

    def newcomers(self) -> list[int]:
        """Return the tickets of those who have come since the last time."""
        count = self._store.add(TICKETS, 0)
        self._drawn += range(self._met + 1, count + 1)
        self._met = count
        here = [ticket for ticket in self._drawn if self._store.check([_here(ticket)])]
        self._drawn = [ticket for ticket in self._drawn if ticket not in here]
        return here


def call(cluster: Torchrun) -> Rendezvous:
    """Return rank 0's own, on the address that the user has named, where every rank finds it.

    Raises:
        UsageError: the address is not this host's, or its port is in use.
    """
    ranks = cluster.ranks
    name = ranks.master[0] if cluster.host == "0.0.0.0" else None
    port = cluster.port or (0 if ranks.has_agent else ranks.master[1])
    meeting = Rendezvous.on(cluster.host, port, name, silence_s=cluster.silence_s)
    if ranks.has_agent:
        _agents_store(cluster).set(ADDRESS, "{}:{}".format(*meeting.place.address))
    return meeting


def enter(place: Endpoint, cluster: Torchrun) -> tuple[int, Connection]:
    """Draw a ticket, and return it with the line to the process that can be met there.

    Args:
        place: where.
        cluster: says how long that process, which may come later than its store, is waited for.

    Raises:
        Broken: it does not come, or is gone.
        RunOver: the run has ended.
    """
    try:
        store = place.client()
        store.wait([OPEN], timedelta(seconds=cluster.start_timeout_s))
        _check_end(store, cluster)
        ticket = int(store.add(TICKETS, 1))
        store.set(_here(ticket), "here")
        _check_end(store, cluster)  # else this ticket is seen in the last look for newcomers
    except RuntimeError as error:
        who = f"the server of slice {place.slice} does not come" if place.slice else "nobody answers"
        raise ConnectionLost("{} at {}:{}".format(who, *place.address)) from error
    return ticket, Connection(store, _pair_key(ticket), 1, place.device, cluster.silence_s)


def _check_end(store: Any, cluster: Torchrun) -> None:
    if store.check([OVER]):
        check_notice(store.get(OVER).decode(), cluster.ranks.token)


def reach(address: tuple[str, int]) -> Endpoint | None:
    """Return the place that is reached by an address, None if nobody answers there."""
    here = _reached_from(address)
    return Endpoint(address, dist.ProcessGroupGloo.create_device(hostname=here)) if here else None


def find(cluster: Torchrun) -> Endpoint:
    """Wait for rank 0, and return where it is met.

    Raises:
        RunError: nowhere, though it was waited for.
    """
    deadline_s = time.monotonic() + cluster.start_timeout_s
    while True:
        address = _address(cluster)
        if address is not None and (place := reach(address)):
            return place
        if time.monotonic() > deadline_s:
            where = "{}:{}".format(*address) if address else "{}:{}".format(*cluster.ranks.master)
            raise RunError(
                f"rank 0 could not be reached at {where} for start_timeout_s = {cluster.start_timeout_s:g} s; "
                "if it runs on another host, give its address, as pl.Torchrun(address=...)"
            )
        time.sleep(LOOK_AGAIN_S)


def is_restart(cluster: Torchrun, what: str) -> bool:
    """Note that rank 0 begins something, and return whether this job of torchrun's had begun it before.

    torchrun counts the restarts after failures only; where a node has come or gone its store remembers.
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
    """Return where rank 0 listens, as far as it is known."""
    ranks = cluster.ranks
    host, port = ranks.master
    if cluster.port is not None:
        return (cluster.host if cluster.host != "0.0.0.0" else host), cluster.port
    if not ranks.has_agent:
        return host, port
    if not _reached_from(ranks.master):
        return None
    with suppress(RuntimeError):
        store = _agents_store(cluster)
        if store.check([ADDRESS]):
            host, _, text = store.get(ADDRESS).decode().rpartition(":")
            return host, int(text)
    return None


def _reached_from(address: tuple[str, int]) -> str | None:
    """Return this host's own address on the way to another one, None if nobody answers there."""
    try:
        with socket.create_connection(address, timeout=2.0) as connection:
            return str(connection.getsockname()[0])
    except OSError:
        return None


def _agents_store(cluster: Torchrun) -> Any:
    return dist.TCPStore(*cluster.ranks.master, None, False, TIMEOUT, wait_for_workers=False)


def _here(ticket: int) -> str:
    return f"here/{ticket}"


def _pair_key(ticket: int) -> str:
    """Return the key of the line between rank 0 and the holder of a ticket."""
    return f"line/{ticket}"
