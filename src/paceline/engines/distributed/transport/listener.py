"""Listener: accepts connections, and admits those of processes that prove that they belong to the job."""

from __future__ import annotations

import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from paceline.engines.distributed.transport.security import (
    OTHER_RUN,
    PREAMBLE_BYTES,
    READ,
    AuthenticationFailed,
    Preamble,
    Security,
    Steps,
    recv_exactly,
)
from paceline.engines.distributed.transport.socket_loop import SocketLoop
from paceline.engines.distributed.transport.stream import StreamSocket
from paceline.recording.metrics.network_counters import NetworkCounters, RejectionCause
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
HANDSHAKE_S = 3.0
MAX_CANDIDATES = 128  # sockets that do not belong to a connection yet; OpenSSL takes up to 60 KB for each
FILES_PART = 8  # of the limit of open files, at most one in so many is such a socket
RETRY_ACCEPT_S = 0.1
LOG_AGAIN_S = 60.0
MAX_LOGGED_HOSTS = 1000


class Candidate:
    """Accepted socket that does not belong to a connection yet.

    Attributes:
        sock: the socket.
        host: address of the other side.
        deadline_s: end of the time for the handshake, on the monotonic clock.
        steps: rest of the handshake; None until the first bytes have come.
        preamble: preamble of the other side, once the handshake is complete.
    """

    def __init__(self, sock: socket.socket, host: str) -> None:
        self.sock: StreamSocket = sock
        self.host = host
        self.deadline_s = time.monotonic() + HANDSHAKE_S
        self.steps: Steps[Preamble] | None = None
        self.preamble: Preamble | None = None

    @property
    def progress(self) -> int:
        """Progress of the handshake: 0 nothing received, 1 something, 2 complete."""
        return (self.steps is not None) + (self.preamble is not None)


class AcceptedSockets(NamedTuple):
    """Both sockets of a connection, authenticated."""

    control: StreamSocket
    data: StreamSocket


class Listener:
    """Listening socket of a server.

    A socket whose other side is silent costs a file descriptor until its deadline; OpenSSL begins with its first bytes.
    Nothing is parsed before the handshake is complete. A full listener closes a socket for each new one: first the
    silent ones, and last those with a complete handshake, and among these one of the host that has most.

    Args:
        loop: thread that reads and writes.
        sock: listening socket.
        security: handshake.
        version: version of paceline, which must be equal on both sides.
        on_sockets: callback, in the thread of the loop, with the sockets of each new connection.
        on_reject: callback, in the thread of the loop, with the reason why a process of this job cannot take part.
        counters: counts of rejected connections.

    Attributes:
        address: host and port to connect to.
    """

    def __init__(
        self,
        loop: SocketLoop,
        sock: socket.socket,
        security: Security,
        version: str,
        on_sockets: Callable[[AcceptedSockets], None],
        on_reject: Callable[[str], None],
        counters: NetworkCounters,
    ) -> None:
        host, port = sock.getsockname()[:2]
        self.address: tuple[str, int] = host, port
        self._loop = loop
        self._sock = sock
        self._security = security
        self._own = Preamble.of(version, security.run_id)
        self._on_sockets = on_sockets
        self._on_reject = on_reject
        self._counters = counters
        self._candidates: dict[Candidate, None] = {}  # oldest first
        self._logged: set[str] = set()
        self._next_log_s = 0.0  # of an error of accept
        self._is_closed = False
        sock.setblocking(False)
        loop.call(self._start)

    def close(self) -> None:
        """Stop to accept connections; those that exist stay, and no further one is reported."""
        self._loop.call_and_wait(self._close)

    def _start(self) -> None:
        self._loop.watch(self._sock, READ, self._accept)
        self._drop_late()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.watch(self._sock, 0, self._accept)
        self._sock.close()
        for candidate in list(self._candidates):
            self._drop(candidate)

    def _accept(self) -> None:
        """Accept one socket; other sockets are read before the next one."""
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no file descriptor is left, for example
            self._pause_accept(error)
            return
        while len(self._candidates) >= _max_candidates():
            self._drop_one()
        sock.setblocking(False)
        candidate = Candidate(sock, str(address[0]))
        self._candidates[candidate] = None
        self._wait(candidate, READ)
        with suppress(OSError):
            sock.recv(1, socket.MSG_PEEK)
            self._advance(candidate)  # now, so that it is not silent when the next socket is accepted

    def _pause_accept(self, error: OSError) -> None:
        """Make room, and try again soon; the connections of the run go on meanwhile."""
        if self._next_log_s <= time.monotonic():
            self._next_log_s = time.monotonic() + LOG_AGAIN_S
            LOG.warning("a connection could not be accepted (%s); the server tries again", error.strerror)
        if self._candidates:
            self._drop_one()
        self._loop.watch(self._sock, 0, self._accept)
        self._loop.call_later(RETRY_ACCEPT_S, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.watch(self._sock, READ, self._accept)

    def _wait(self, candidate: Candidate, event: int) -> None:
        self._loop.watch(candidate.sock, event, lambda: self._advance(candidate))

    def _advance(self, candidate: Candidate) -> None:
        """Carry out the next steps of a handshake."""
        if candidate not in self._candidates:  # closed since the selector returned
            return
        try:
            if candidate.steps is None:
                candidate.sock = self._security.wrap(candidate.sock, is_server=True)
                candidate.steps = self._handshake(candidate.sock)
            event = next(candidate.steps)
        except StopIteration as end:
            self._wait(candidate, 0)
            candidate.preamble = end.value
            self._pair(candidate, end.value)
        except AuthenticationFailed as error:
            self._reject(candidate, RejectionCause.AUTHENTICATION, error)
        except OSError as error:
            self._reject(candidate, RejectionCause.DISCONNECTED, error)
        else:
            self._wait(candidate, event)

    def _handshake(self, sock: StreamSocket) -> Steps[Preamble]:
        yield from self._security.authenticate(sock, is_server=True)
        content = yield from recv_exactly(sock, PREAMBLE_BYTES)
        return Preamble.decode(content)

    def _pair(self, candidate: Candidate, preamble: Preamble) -> None:
        """Complete a connection if its other socket has been authenticated before."""
        ours = preamble._replace(version=self._own.version, run=self._own.run)
        if preamble != ours:
            with suppress(OSError):
                candidate.sock.send(ours.encode())
            if preamble.version == ours.version:
                self._reject(candidate, RejectionCause.OTHER_RUN, OTHER_RUN)
                return
            self._drop(candidate)
            if preamble.is_control:  # the data socket would report the same once more
                self._counters.on_rejected(RejectionCause.OTHER_VERSION)
                self._on_reject(
                    f"a process at {candidate.host} runs paceline {preamble.version}, this one {ours.version}: "
                    "install the same version on every host"
                )
            return
        other = self._find(preamble._replace(is_control=not preamble.is_control))
        if other is None:
            return
        control, data = (candidate, other) if preamble.is_control else (other, candidate)
        for each in (control, data):
            del self._candidates[each]
        with suppress(OSError):  # the connection reports it
            control.sock.send(ours.encode())
        self._on_sockets(AcceptedSockets(control.sock, data.sock))

    def _find(self, preamble: Preamble) -> Candidate | None:
        return next((each for each in self._candidates if each.preamble == preamble), None)

    def _drop_late(self) -> None:
        """Close the sockets whose deadline has passed, from time to time."""
        if self._is_closed:
            return
        self._loop.call_later(HANDSHAKE_S / 4, self._drop_late)
        now_s = time.monotonic()
        for candidate in [each for each in self._candidates if each.deadline_s < now_s]:
            self._reject(candidate, RejectionCause.TIMEOUT, f"no complete handshake within {HANDSHAKE_S:g} s")

    def _drop_one(self) -> None:
        """Close the socket with the least progress, of the host with the most sockets; the oldest of these."""
        sockets = Counter(each.host for each in self._candidates)
        least = min(self._candidates, key=lambda each: (each.progress, -sockets[each.host]))
        self._reject(least, RejectionCause.OVERLOAD, "too many connections without authentication")

    def _reject(self, candidate: Candidate, cause: RejectionCause, reason: object) -> None:
        """Close and count a socket, and log the first rejection of each host as a warning."""
        self._counters.on_rejected(cause)
        is_first = candidate.host not in self._logged and len(self._logged) < MAX_LOGGED_HOSTS
        if is_first:
            self._logged.add(candidate.host)
        level = logging.WARNING if is_first else logging.DEBUG
        LOG.log(level, "rejected a connection from %s: %s", candidate.host, reason)
        self._drop(candidate)

    def _drop(self, candidate: Candidate) -> None:
        del self._candidates[candidate]
        self._wait(candidate, 0)
        candidate.sock.close()


def _max_candidates() -> int:
    """Return how many sockets may be open that do not belong to a connection yet."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CANDIDATES, max(2, files // FILES_PART)) if files > 0 else MAX_CANDIDATES
