"""Transport: how the processes of a job reach each other."""

from __future__ import annotations

import itertools
import resource
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import cached_property
from math import ceil
from typing import Any

from paceline.clusters.devices import cores
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.gloo import CONNECT_TIMEOUT_S, gloo_group
from paceline.engines.distributed.transport.listener import HANDSHAKE_S, AcceptedSockets, Listener
from paceline.engines.distributed.transport.security import (
    OTHER_RUN,
    PREAMBLE_BYTES,
    AuthenticationFailed,
    Preamble,
    Security,
    recv_exactly,
    run_blocking,
)
from paceline.engines.distributed.transport.socket_loop import SocketLoop
from paceline.engines.distributed.transport.stream import StreamSocket
from paceline.errors import UsageError
from paceline.recording.metrics.network_counters import NetworkCounters
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
Address = tuple[str, int]


def address_text(address: Address) -> str:
    """Return host and port, as in 10.0.0.1:29500."""
    host, port = address
    return f"{host}:{port}"


BUFFER_BYTES = 1 << 22  # of a socket, each way; the kernel doubles it
BACKLOG = 1024
MOST_DATA_THREADS = 4  # more would wait for Python's lock
REJECTED = "it has closed the connection, as it does when the certificate of this process is expired or not accepted"


class Transport:
    """Connections of one process over TCP, and its groups for sums.

    Args:
        security: returns the handshake of new connections; the token may be known only when a connection is made.
        version: version of paceline.
        heartbeat_timeout_s: seconds without any byte after which a process counts as lost, >= 1.

    Attributes:
        heartbeat_timeout_s: as given.
        counters: counts of bytes and of rejected connections.
        poll_s: interval in seconds between two attempts to reach a process.
        data_threads: number of threads that read and write tensors; 0 if that of the messages does so.
    """

    poll_s = 0.1

    def __init__(self, security: Callable[[], Security], version: str, heartbeat_timeout_s: float) -> None:
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.counters = NetworkCounters()
        self.data_threads = min(cores(), MOST_DATA_THREADS) if cores() > 1 else 0
        self._security = security
        self._version = version
        self._numbers = itertools.count()  # of the connections
        self._data_loops: list[SocketLoop] = []
        self._lock = threading.Lock()

    @cached_property
    def _loop(self) -> SocketLoop:
        return SocketLoop()

    def listen(
        self,
        host: str,
        port: int,
        on_connection: Callable[[Connection], None],
        on_reject: Callable[[str], None],
    ) -> Listener:
        """Listen on an address of this host.

        Args:
            host: address to listen on.
            port: port to listen on; 0 for a free one.
            on_connection: callback, in the thread of the sockets, with each authenticated connection.
            on_reject: callback, in that thread, with the reason why a process of this job cannot take part.

        Raises:
            UsageError: the address is not this host's, or its port is in use.
        """

        def on_sockets(sockets: AcceptedSockets) -> None:
            connection = self._connection(*sockets)
            connection.waits_for_reader = True
            on_connection(connection)

        _raise_file_limit()
        security = self._security()
        sock = self._bind(host, port)
        listener = Listener(
            loop=self._loop,
            sock=sock,
            security=security,
            version=self._version,
            on_sockets=on_sockets,
            on_reject=on_reject,
            counters=self.counters,
        )
        LOG.info("listens on %s, %s", address_text(listener.address), security.description)
        return listener

    def connect(self, address: Address) -> Connection:
        """Connect to the server at an address.

        Raises:
            ConnectionLost: no process answers there.
            AuthenticationFailed: the process there does not belong to this job.
            UsageError: the process there runs another version of paceline.
        """
        security = self._security()
        deadline_s = time.monotonic() + HANDSHAKE_S
        preamble = Preamble.of(self._version, security.run_id, secrets.token_bytes(16))
        control = data = None
        try:
            control = self._handshake(address, security, preamble, deadline_s)
            data = self._handshake(address, security, preamble._replace(is_control=False), deadline_s)
            answer = Preamble.decode(run_blocking(recv_exactly(control, PREAMBLE_BYTES), control, deadline_s))
            self._check_version(address, preamble.version, answer.version)
            if answer.run != preamble.run:
                raise AuthenticationFailed(OTHER_RUN)
            return self._connection(control, data)
        except BaseException as error:
            for sock in (control, data):
                if sock is not None:
                    sock.close()
            if isinstance(error, AuthenticationFailed | ssl.SSLError):
                reason = REJECTED if isinstance(error, ssl.SSLEOFError) else error
                raise AuthenticationFailed(f"{address_text(address)} is not of this job: {reason}") from error
            if isinstance(error, OSError | ConnectionLost):
                reason = getattr(error, "strerror", None) or str(error)
                raise ConnectionLost(f"{address_text(address)} does not answer ({reason})") from error
            raise

    def group(
        self, store: Any, rank: int, size: int, host: str, *, timeout_s: float = CONNECT_TIMEOUT_S, threads: int = 1
    ) -> Any:
        """Return a process group on gloo for sums; the arguments are those of `gloo_group`.

        Raises:
            RuntimeError: a process did not connect.
        """
        return gloo_group(store, rank, size, host, timeout_s=timeout_s, threads=threads)

    def close(self) -> None:
        """Stop the threads; all connections have been closed."""
        if "_loop" in self.__dict__:
            self._loop.call_and_wait(lambda: None)  # so that all are told
            for loop in self._data_loops:
                loop.close()
            self._data_loops.clear()
            self._loop.close()
            del self._loop

    def _bind(self, host: str, port: int) -> socket.socket:
        """Return a listening socket.

        Raises:
            UsageError: the address is not this host's, or its port is in use.
        """
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that is started again takes the same port
        self._tune(sock)  # accepted sockets inherit it
        try:
            sock.bind((host, port))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            where = f"{host}:{port}" if port else host
            raise UsageError(
                f"cannot listen on {where} ({error.strerror}); give an address of this host and a free port, as "
                f"pl.Torchrun(address='{host}:29511')"
            ) from None
        return sock

    def _dial(self, address: Address, timeout_s: float) -> socket.socket:
        """Return a connected socket.

        Raises:
            OSError: no process listens there.
        """
        try:
            sock = socket.create_connection(address, timeout=timeout_s)
        except (ValueError, OverflowError) as error:  # an address from torchrun's store, which any process may change
            raise OSError(f"no valid address: {error}") from error
        self._tune(sock)
        return sock

    def _tune(self, sock: socket.socket) -> None:
        """Send small messages at once, use large buffers, and detect a host that does not respond."""
        timeout_s = ceil(self.heartbeat_timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, timeout_s // 4))
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, timeout_s // 4))
            # Later than the heartbeats, which name the reason: OpenSSL reports this error as the end of the stream.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000 * timeout_s)

    def _handshake(self, address: Address, security: Security, preamble: Preamble, deadline_s: float) -> StreamSocket:
        """Return an authenticated socket on which the preamble has been sent."""
        dialed = self._dial(address, max(0.001, deadline_s - time.monotonic()))
        dialed.setblocking(False)
        sock = security.wrap(dialed, is_server=False)
        try:
            run_blocking(security.authenticate(sock, is_server=False), sock, deadline_s)
            sock.send(preamble.encode())
        except BaseException:
            sock.close()
            raise
        return sock

    def _check_version(self, address: Address, ours: str, theirs: str) -> None:
        if theirs != ours:
            raise UsageError(
                f"the process at {address_text(address)} runs paceline {theirs}, this one {ours}: install the "
                "same version on every host"
            )

    def _connection(self, control: StreamSocket, data: StreamSocket) -> Connection:
        data_loop = self._data_loop(next(self._numbers))
        return Connection(self._loop, control, data, self.heartbeat_timeout_s, self.counters, data_loop=data_loop)

    def _data_loop(self, number: int) -> SocketLoop | None:
        """Return the thread of the tensors of a connection; None for that of the messages."""
        if self.data_threads == 0:
            return None
        with self._lock:
            if len(self._data_loops) < self.data_threads:
                self._data_loops.append(SocketLoop())
            return self._data_loops[number % len(self._data_loops)]


def _raise_file_limit() -> None:
    """Allow this process as many open files as the operating system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # some systems report a hard limit that they do not grant
            LOG.info("the limit of open files stays at %d: %s", soft, error)
        else:
            LOG.info("raised the limit of open files from %d to %d", soft, hard)
