"""Security of connections: the handshake in which both sides prove that they belong to the job."""

from __future__ import annotations

import hmac
import secrets
import selectors
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from socket import socket
from typing import NamedTuple, TypeVar

from paceline.engines.distributed.transport.connection import ConnectionLost

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
VERSION_BYTES = 32
PREAMBLE_BYTES = VERSION_BYTES + 16 + 1
NONCE_BYTES = PROOF_BYTES = 32
T = TypeVar("T")
Steps = Generator[int, None, T]  # yields the event of the socket to wait for
NO_TOKEN = "it does not have the token of this job"


class AuthenticationFailed(ConnectionLost):
    """The other side has not proved that it belongs to the job."""


class Security(ABC):
    """Authentication of both sides of a new socket.

    Attributes:
        description: what protects the connection, for logs.
    """

    description: str

    def wrap(self, sock: socket, *, is_server: bool) -> socket:
        """Return the socket to use instead of this one, before any byte is read."""
        return sock

    @abstractmethod
    def authenticate(self, sock: socket, *, is_server: bool) -> Steps[None]:
        """Authenticate the other side of a non-blocking socket.

        Raises:
            AuthenticationFailed: the other side does not belong to the job.
            OSError: the socket has ended.
        """


class TokenSecurity(Security):
    """Authentication by a shared token without encryption: HMAC-SHA256 over random numbers of both sides.

    A process between the two sides can read and change everything after the handshake.

    Args:
        token: secret of the job.
        run_id: id of the run under torchrun; empty without one.
    """

    description = "without encryption"

    def __init__(self, token: str, run_id: str = "") -> None:
        self._key = hmac.digest(token.encode(), b"paceline plain 1\0" + run_id.encode(), "sha256")

    def authenticate(self, sock: socket, *, is_server: bool) -> Steps[None]:
        """Exchange random numbers, and then proofs, in which each side names itself."""
        ours = secrets.token_bytes(NONCE_BYTES)
        sock.send(ours)  # a new socket has room for it
        theirs = yield from recv_exactly(sock, NONCE_BYTES)
        nonces = theirs + ours if is_server else ours + theirs
        sock.send(self._proof(nonces, is_server=is_server))
        proof = yield from recv_exactly(sock, PROOF_BYTES)
        if not hmac.compare_digest(proof, self._proof(nonces, is_server=not is_server)):
            raise AuthenticationFailed(NO_TOKEN)

    def _proof(self, nonces: bytes, *, is_server: bool) -> bytes:
        """Return the proof of one side, given the random numbers of the client and of the server."""
        return hmac.digest(self._key, (b"server" if is_server else b"client") + nonces, "sha256")


class Preamble(NamedTuple):
    """First bytes of the client on each socket after the handshake, and of the server on the control socket.

    Attributes:
        version: version of paceline.
        nonce: random number that is the same on both sockets of a connection.
        is_control: whether the socket carries messages; else tensors.
    """

    version: str
    nonce: bytes
    is_control: bool

    def encode(self) -> bytes:
        """Return the bytes to send.

        >>> Preamble.decode(Preamble("0.2.0", bytes(16), True).encode()).version
        '0.2.0'
        """
        return self.version.encode().ljust(VERSION_BYTES)[:VERSION_BYTES] + self.nonce + bytes([self.is_control])

    @classmethod
    def decode(cls, content: bytes) -> Preamble:
        """Return the preamble of such bytes."""
        version = content[:VERSION_BYTES].decode(errors="replace").strip()
        return cls(version, content[VERSION_BYTES:-1], bool(content[-1]))


def recv_exactly(sock: socket, nbytes: int) -> Steps[bytes]:
    """Receive this many bytes from a non-blocking socket.

    Raises:
        OSError: the socket has ended.
    """
    received = b""
    while len(received) < nbytes:
        try:
            more = sock.recv(nbytes - len(received))
        except (BlockingIOError, ssl.SSLWantReadError):
            yield READ
        else:
            if not more:
                raise OSError("the other process has closed the connection")
            received += more
    return received


def run_blocking(steps: Steps[T], sock: socket, deadline_s: float) -> T:
    """Run the steps on a non-blocking socket, and wait between them until a deadline on the monotonic clock.

    Raises:
        ConnectionLost: the deadline has passed.
    """
    while True:
        try:
            event = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        with selectors.DefaultSelector() as selector:
            selector.register(sock, event)
            if not selector.select(max(0.0, deadline_s - time.monotonic())):
                raise ConnectionLost("the other process does not answer")
