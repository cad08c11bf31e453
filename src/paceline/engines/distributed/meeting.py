"""Where the processes of a job find rank 0 and the servers of slices: rank 0's store, and the tickets drawn there."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from paceline.engines.distributed.line import Broken, Line, dist
from paceline.errors import RunError, UsageError
from paceline.torchrun import Torchrun

TIMEOUT = timedelta(seconds=20)
LOOK_AGAIN_S = 0.1
TICKETS = "tickets"
OPEN = "open"  # set when tickets are looked at
ADDRESS = "paceline/address"  # of rank 0, in the store of torchrun's agents, who may count restarts differently


class Meeting(ABC):
    """Where processes come that want to take part, in a store.

    Args:
        store: of this process alone.
        device: gloo's, on the address of this host.
        silence_s: of a line.
    """

    def __init__(self, store: Any, device: Any, silence_s: float) -> None:
        self._store = store
        self._device = device
        self._silence_s = silence_s
        self._met = 0  # tickets drawn, of those that are known
        self._drawn: list[int] = []  # whose holders have not said that they are there
        store.set(OPEN, "open")

    @abstractmethod
    def _another_client(self) -> Any:
        """Return another connection to the store: whoever waits at one keeps all others from it."""

    def line(self, ticket: int) -> Line:
        """Wait for the holder of a ticket and return the line to it.

        Raises:
            Broken: it has not stayed.
        """
        return Line(self._another_client(), pair_key(ticket), 0, self._device, self._silence_s)

    def newcomers(self) -> list[int]:
        """Return the tickets of those who have come since the last time."""
        count = self._store.add(TICKETS, 0)
        self._drawn += range(self._met + 1, count + 1)
        self._met = count
        here = [ticket for ticket in self._drawn if self._store.check([_here(ticket)])]
        self._drawn = [ticket for ticket in self._drawn if ticket not in here]
        return here


class MeetingAtRank0(Meeting):
    """The store of a job, on the address that the user has named, and gloo's device there.

    Args:
        cluster: says where.

    Raises:
        UsageError: the address is not this host's, or its port is in use.
    """

    def __init__(self, cluster: Torchrun) -> None:
        ranks = cluster.ranks
        host = cluster.host
        wanted = cluster.port or (0 if ranks.has_agent else ranks.master[1])
        listener = _listen(host, wanted)
        port = listener.getsockname()[1]
        self._reachable = (ranks.master[0] if host == "0.0.0.0" else host, port)
        store = dist.TCPStore(
            host, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        super().__init__(store, dist.ProcessGroupGloo.create_device(hostname=self._reachable[0]), cluster.silence_s)
        if ranks.has_agent:
            _agents_store(cluster).set(ADDRESS, f"{self._reachable[0]}:{port}")

    def _another_client(self) -> Any:
        return _client(self._reachable)


class MeetingAtSlice(Meeting):
    """Where workers come to the server of a slice: a part of rank 0's store.

    Args:
        met: rank 0.
        number: of the slice.
        silence_s: of a line.
    """

    def __init__(self, met: Met, number: int, silence_s: float) -> None:
        self._met_there = met
        self._number = number
        super().__init__(_of_slice(met.another_client(), number), met.device, silence_s)

    def _another_client(self) -> Any:
        return _of_slice(self._met_there.another_client(), self._number)


class Met(NamedTuple):
    """Rank 0 has been found.

    Attributes:
        address: of its store.
        store: a connection to it.
        ticket: by which rank 0 knows this process.
        device: gloo's, on the address of this host from which rank 0 is reached.
    """

    address: tuple[str, int]
    store: Any
    ticket: int
    device: Any

    def another_client(self) -> Any:
        """Return another connection to the store."""
        return _client(self.address)

    def line_to(self, number: int, wait_s: float, silence_s: float) -> Line:
        """Return the line to the server of a slice, when it is there; the first one, 0, is at rank 0.

        Raises:
            Broken: it does not come.
        """
        if number == 0:
            return Line(self.store, pair_key(self.ticket), 1, self.device, silence_s)
        store = _of_slice(self.another_client(), number)
        try:
            store.wait([OPEN], timedelta(seconds=wait_s))
        except RuntimeError as error:
            raise Broken(f"the server of slice {number} has not come") from error
        return Line(store, pair_key(_draw_ticket(store)), 1, self.device, silence_s)


def meet(cluster: Torchrun) -> Met:
    """Find rank 0.

    Raises:
        RunError: there is none, though it was waited for.
    """
    deadline = time.monotonic() + cluster.start_timeout_s
    while True:
        address = _address(cluster)
        if address is not None and (here := _reached_from(address)):
            store = _client(address)
            device = dist.ProcessGroupGloo.create_device(hostname=here)
            return Met(address, store, _draw_ticket(store), device)
        if time.monotonic() > deadline:
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


def _client(address: tuple[str, int]) -> Any:
    return dist.TCPStore(*address, None, False, TIMEOUT, wait_for_workers=False)


def _agents_store(cluster: Torchrun) -> Any:
    return _client(cluster.ranks.master)


def _of_slice(store: Any, number: int) -> Any:
    return dist.PrefixStore(f"slice/{number}", store)


def _draw_ticket(store: Any) -> int:
    ticket = int(store.add(TICKETS, 1))
    store.set(_here(ticket), "here")
    return ticket


def _here(ticket: int) -> str:
    return f"here/{ticket}"


def pair_key(ticket: int) -> str:
    """Return the key of the line between rank 0 and the holder of a ticket."""
    return f"line/{ticket}"
