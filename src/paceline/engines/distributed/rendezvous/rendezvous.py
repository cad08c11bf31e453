"""Rendezvous of a job's processes: where rank 0 listens, and how all others find it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from hashlib import sha256
from math import inf
from typing import Any, TypeVar

import torch

from paceline.clusters.launch_env import BEGUN, TOKEN
from paceline.clusters.placement import LOOPBACK
from paceline.clusters.rank_checks import host_and_port
from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer, Acceptor, PeerHandler
from paceline.engines.distributed.rendezvous.first_workers import NOTICE_S
from paceline.engines.distributed.rendezvous.session import ClientSession
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.gloo import dist
from paceline.engines.distributed.transport.messages import Hello
from paceline.engines.distributed.transport.security import AuthenticationFailed
from paceline.engines.distributed.transport.transport import Address, Transport, address_text
from paceline.errors import RunError, UsageError
from paceline.utils.rank_logger import RankLogger

T = TypeVar("T")
LOG = RankLogger(__name__)
ADDRESS = "paceline/address"  # of rank 0, in the store of torchrun's agents, who may count restarts differently
AGENT_STORE_TIMEOUT = timedelta(seconds=20)
OTHER_SERVER_S = 5.0  # for the address or the token of an earlier run to be replaced


def listen_as_rank_0(
    cluster: Torchrun,
    transport: Transport,
    job_spec: dict[str, Any],
    processes: int,
    handler: PeerHandler,
    on_accept: Callable[[AcceptedPeer], None] = lambda peer: None,
) -> Acceptor:
    """Return the acceptor of rank 0, on the address that the user has given, where every rank finds it.

    Raises:
        UsageError: the address is not this host's, or its port is in use.
        RunError: the address cannot be published in torchrun's store.
    """
    ranks = cluster.ranks
    port = cluster.port or (0 if ranks.has_agent else ranks.master[1])
    acceptor = Acceptor(
        transport=transport,
        host=cluster.host,
        port=port,
        job_spec=job_spec,
        processes=processes,
        handler=handler,
        on_accept=on_accept,
    )
    if ranks.has_agent and cluster.port is None:
        host = ranks.master[0] if cluster.host == "0.0.0.0" else cluster.host
        try:
            _store_of_rank_0(ranks.master).set(ADDRESS, f"{host}:{acceptor.address[1]}")
        except RuntimeError as error:
            acceptor.close()
            raise RunError(
                f"the address of rank 0 cannot be published in torchrun's store at {address_text(ranks.master)} "
                f"({_line(error)}): start the job again, or give every rank a port, as "
                f"pl.Torchrun(address='{host}:29511')"
            ) from None
    _store_of_rank_0.cache_clear()  # which closes it
    return acceptor


def find_rank_0(cluster: Torchrun, transport: Transport, join: Callable[[Address], T]) -> T:
    """Call a function with the address of rank 0, or of the server that has taken its place, until it connects.

    Args:
        cluster: launch settings of this process, with the time to wait for rank 0.
        transport: transport to rank 0.
        join: function that connects, as `Transport.connect` or a part of `ClientSession.connect`.

    Raises:
        UsageError: the process at that address does not belong to this job.
        RunError: rank 0 cannot be reached within the start timeout.
    """
    server = cluster.server_name
    deadline_s = time.monotonic() + cluster.start_timeout_s
    notice_s = time.monotonic() + NOTICE_S
    refused_s = inf  # since when a process of another job answers
    reason = "its address is not known yet"
    lookup = _AddressLookup(cluster)
    given = cluster.standby_address
    other = cluster.ranks.server or (host_and_port(given) if given else None)
    is_at_other = cluster.ranks.server is None
    while True:
        is_at_other = other is not None and not is_at_other
        address = other if is_at_other else lookup.address()
        try:
            if address is not None:
                return join(address)
        except AuthenticationFailed as error:
            if refused_s == inf:
                LOG.warning("%s is not there yet: %s", server, error)
            refused_s = min(refused_s, time.monotonic())
            reason = str(error)
            if time.monotonic() > refused_s + OTHER_SERVER_S:
                raise UsageError(f"{error}; {_advice(cluster)}") from error
        except ConnectionLost as error:
            reason, refused_s = str(error), inf  # that process is gone
            LOG.debug("%s is not there yet: %s", server, error)
        if time.monotonic() > notice_s:
            LOG.warning("waiting for %s, for up to start_timeout_s=%g: %s", server, cluster.start_timeout_s, reason)
            notice_s = inf
        if time.monotonic() > deadline_s:
            where = address_text(address or cluster.ranks.master)
            raise RunError(
                f"{server} could not be reached at {where} within start_timeout_s={cluster.start_timeout_s:g}: "
                f"{reason}; if it runs on another host, give its address, as pl.Torchrun(address=...)"
                f"{_check_encrypt(cluster)}"
            )
        time.sleep(transport.poll_s)


def join_rank_0(cluster: Torchrun, transport: Transport, hello: Hello) -> ClientSession:
    """Join rank 0 when it listens; raise what `find_rank_0` and `ClientSession.connect` raise."""

    def join(address: Address) -> ClientSession:
        return ClientSession.connect(transport, address, hello, cluster.server_name)

    return find_rank_0(cluster, transport, join)


def _advice(cluster: Torchrun) -> str:
    if cluster.tls_cert is not None:
        return "give every rank certificates of the same authority as tls_cert, tls_key and tls_ca"
    return f"set {TOKEN} to the same value on every host, and encrypt to the same value for every rank"


def _check_encrypt(cluster: Torchrun) -> str:
    """Return what else may be wrong: a server with TLS resets a connection without it, and cannot say why."""
    return "" if cluster.encrypt else "; if rank 0 uses TLS, leave out encrypt=False here"


def is_restart(cluster: Torchrun, what: str, *, begins: bool = True) -> bool:
    """Return whether this job of torchrun had begun a run before.

    torchrun counts only restarts after failures. The store of its agents also outlives a restart after a node has
    joined or left. Any process that reaches the store can change the count, and with it only this answer.

    Args:
        cluster: launch settings of this process.
        what: name of the run, as the path of its folder.
        begins: whether rank 0 begins it now, which is recorded.
    """
    ranks = cluster.ranks
    if not ranks.has_agent:
        return ranks.restarts > 0
    what = sha256(os.fsencode(what)).hexdigest()  # the store has no texts with bytes that are not UTF-8
    times = 0
    try:
        if ranks.keeps_ranks:
            if begins:
                _note_begin(ranks.master, what)
            return what in ranks.begun
        times = int(_store_of_rank_0(ranks.master).add(f"paceline/begun/{what}", int(begins)))
    except RuntimeError as error:  # also where the store holds no number
        _store_of_rank_0.cache_clear()
        LOG.warning(
            "torchrun's store at %s does not count the starts of this run (%s): a restart is detected only after a "
            "failure",
            address_text(ranks.master),
            _line(error),
        )
    return ranks.restarts > 0 or times > begins


def _note_begin(master: Address, what: str) -> None:
    """Add the digest of a run to those of which `paceline run` knows that they have begun.

    Raises:
        RuntimeError: the store does not answer.
    """
    store = _store_of_rank_0(master)
    begun = store.get(BEGUN).decode().splitlines() if store.check([BEGUN]) else []
    _put(store, BEGUN, "\n".join(dict.fromkeys([*begun, what])))


def serve_store(listener: socket.socket) -> Any:
    """Return the store of a launcher, as that of torchrun's agents, on a socket that listens already."""
    older = {"use_libuv": False} if torch.__version__ < "2.8" else {}  # whose default store takes no socket
    return dist.TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        timeout=AGENT_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        **older,
    )


def reach_store(host: str, port: int, timeout_s: float) -> Any:
    """Return a client of a launcher's store; None if it is not reached."""
    try:
        socket.create_connection((host, port), timeout_s).close()  # else torch logs each of its tries
        timeout = timedelta(seconds=timeout_s)
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (OSError, RuntimeError):
        return None


def tell_launcher(cluster: Torchrun, fact: str, *, holds: bool = True) -> None:
    """Tell `paceline run` a fact about the run, by which it decides whether all ranks are started again with rank 0.

    Args:
        cluster: launch settings of this process.
        fact: `STANDBY`, rank 0 has a standby; or `ENDED`, the run has ended, by no crash and no interrupt.
        holds: whether it holds from now on; a script may train several runs.
    """
    _put_in_launcher(cluster, fact, "1" if holds else "")


def publish_successor(cluster: Torchrun, address: Address) -> None:
    """Publish where the standby listens that has taken over, for ranks that `paceline run` starts again.

    Ranks with a given address of rank 0, or of the standby, do not look there.
    """
    _put_in_launcher(cluster, ADDRESS, address_text(address))


def _put_in_launcher(cluster: Torchrun, key: str, value: str) -> None:
    ranks = cluster.ranks
    if not (ranks.keeps_ranks and ranks.has_agent):
        return
    try:
        _put(_agent_store(ranks.master), key, value)
    except RuntimeError as error:
        LOG.warning("paceline run does not answer at %s (%s)", address_text(ranks.master), _line(error))


class _AddressLookup:
    """Lookup of the address at which rank 0 is to be found.

    Nothing depends on what torchrun's store holds but where this process connects to: the handshake proves who answers.
    One client of the store serves all lookups, because the store looks up the host name of every new one.

    Args:
        cluster: launch settings of this process.
    """

    def __init__(self, cluster: Torchrun) -> None:
        self._cluster = cluster
        self._store: Any = None

    def address(self) -> Address | None:
        """Return the address, None if it is not known yet."""
        cluster, ranks = self._cluster, self._cluster.ranks
        host, port = ranks.master
        if cluster.port is not None:
            return (cluster.host if cluster.host != "0.0.0.0" else host), cluster.port
        if not ranks.has_agent:
            return host, port
        try:
            self._store = self._store or _agent_store(ranks.master)
            if self._store.check([ADDRESS]):
                host, _, text = self._store.get(ADDRESS).decode().rpartition(":")
                return host, int(text)
        except RuntimeError:
            self._store = None  # the agents are gone, or have restarted
        except ValueError:
            LOG.debug("the store of torchrun's agents holds no valid address of rank 0")
        return None


def _put(store: Any, key: str, value: str) -> None:
    """Set a key, and wait until the store has it: older versions of torch only send it."""
    store.set(key, value)
    store.check([key])


def _agent_store(address: Address) -> Any:
    """Return a client of the store of torchrun's agents at an address.

    Raises:
        RuntimeError: no store answers there.
    """
    host, port = address
    return dist.TCPStore(host, port, is_master=False, timeout=AGENT_STORE_TIMEOUT, wait_for_workers=False)


_store_of_rank_0 = lru_cache(maxsize=1)(_agent_store)  # one client, since each new one looks up the host name


def _line(error: RuntimeError) -> str:
    """Return the first line of an error of torch, without the stack of C++."""
    return str(error).partition("\n")[0]
