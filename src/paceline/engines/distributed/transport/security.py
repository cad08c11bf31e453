"""Security of connections: the handshake in which both sides prove that they belong to the job."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import selectors
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from functools import lru_cache
from typing import NamedTuple, TypeVar

from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.stream import StreamSocket

READ = selectors.EVENT_READ
SCRYPT = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 1 << 26}  # 32 MB, about 0.1 s
VERSION_BYTES, RUN_BYTES = 64, 16
PREAMBLE_BYTES = VERSION_BYTES + RUN_BYTES + 16 + 1
NONCE_BYTES = PROOF_BYTES = 32
T = TypeVar("T")
Steps = Generator[int, None, T]  # yields the event of the socket to wait for
PURPOSE_PLAIN = b"paceline plain 1"
OTHER_RUN = "it belongs to another run of torchrun"
NO_TOKEN = "it does not have the token of this job"


class AuthenticationFailed(ConnectionLost):
    """The other side has not proved that it belongs to the job."""


@lru_cache(maxsize=8)
def derive_key(token: str, run_id: str, purpose: bytes) -> bytes:
    """Return a key of 32 bytes, from which the token can be guessed only slowly.

    Args:
        token: secret of the job.
        run_id: id of the run under torchrun, so that two runs with one token do not meet; empty without one.
        purpose: use of the key; each use has a key of its own.
    """
    return hashlib.scrypt(token.encode(), salt=purpose + b"\0" + run_id.encode(), dklen=32, **SCRYPT)


class Security(ABC):
    """Authentication of both sides of a new socket.

    Attributes:
        description: what protects the connection, for logs.
        run_id: id of the run under torchrun, which must be equal on both sides; empty without one.
    """

    description: str
    run_id: str = ""

    @abstractmethod
    def wrap(self, sock: StreamSocket, *, is_server: bool) -> StreamSocket:
        """Return the socket to use instead of this one, before any byte is read."""

    @abstractmethod
    def authenticate(self, sock: StreamSocket, *, is_server: bool) -> Steps[None]:
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
        self._key = derive_key(token, run_id, PURPOSE_PLAIN)

    def wrap(self, sock: StreamSocket, *, is_server: bool) -> StreamSocket:
        """Return the socket itself."""
        return sock

    def authenticate(self, sock: StreamSocket, *, is_server: bool) -> Steps[None]:
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
        # The name of the side keeps a proof from being sent back to the side that made it.
        return hmac.digest(self._key, (b"server" if is_server else b"client") + nonces, "sha256")


class Preamble(NamedTuple):
    """First bytes of the client on each socket after the handshake, and of the server on the control socket.

    Attributes:
        version: version of paceline, of which `VERSION_BYTES` are sent.
        run: digest of the run id.
        nonce: random number that is the same on both sockets of a connection.
        is_control: whether the socket carries messages; else tensors.
    """

    version: str
    run: bytes
    nonce: bytes
    is_control: bool

    @classmethod
    def of(cls, version: str, run_id: str, nonce: bytes = bytes(16), *, is_control: bool = True) -> Preamble:
        """Return the preamble of a process."""
        run = hashlib.blake2b(run_id.encode(), digest_size=RUN_BYTES).digest()
        return cls(version=version[:VERSION_BYTES], run=run, nonce=nonce, is_control=is_control)

    def encode(self) -> bytes:
        """Return the bytes to send.

        >>> Preamble.decode(Preamble.of("0.2.0", "run 7").encode()).version
        '0.2.0'
        """
        return self.version.encode().ljust(VERSION_BYTES) + self.run + self.nonce + bytes([self.is_control])

    @classmethod
    def decode(cls, content: bytes) -> Preamble:
        """Return the preamble of such bytes."""
        version = content[:VERSION_BYTES].decode(errors="replace").strip()
        run, nonce = content[VERSION_BYTES:][:RUN_BYTES], content[VERSION_BYTES + RUN_BYTES : -1]
        return cls(version=version, run=run, nonce=nonce, is_control=bool(content[-1]))


def recv_exactly(sock: StreamSocket, nbytes: int) -> Steps[bytes]:
    """Receive this many bytes from a non-blocking socket.

    Raises:
        OSError: the socket has ended.
    """
    received = b""
    while len(received) < nbytes:
        try:
            more = sock.recv(nbytes - len(received))
        except BlockingIOError:
            yield READ
        else:
            if not more:
                raise OSError("the other process has closed the connection")
            received += more
    return received


def run_blocking(steps: Steps[T], sock: StreamSocket, deadline_s: float) -> T:
    """Run the steps on a non-blocking socket, and wait between them until a deadline on the monotonic clock.

    Raises:
        ConnectionLost: the deadline has passed.
    """
    while time.monotonic() < deadline_s:
        try:
            event = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        with selectors.DefaultSelector() as selector:
            selector.register(sock, event)
            selector.select(max(0.0, deadline_s - time.monotonic()))
    raise ConnectionLost("the other process does not answer")
