"""TLS socket: TLS over a non-blocking socket, many records with each system call."""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import Any

from paceline.engines.distributed.transport.security import READ, AuthenticationFailed, Steps
from paceline.engines.distributed.transport.stream import StreamSocket

OTHER_SECRET = "as with another PACELINE_TOKEN, another tls_ca or an expired tls_cert"
FIRST_BYTES = 1 << 14  # received at once, until the other side is authenticated and sends more
BATCH_BYTES = 1 << 19  # encrypted or received at once afterwards


class TLSSocket:
    """TLS over a connected, non-blocking socket.

    `ssl.SSLSocket` makes up to three system calls for each record of 16 KB. Here OpenSSL works on memory, so that a
    system call moves hundreds of KB, and an attacker who sends records without content occupies no thread: each call
    handles only what one system call has received.

    Args:
        sock: socket.
        context: key and certificates of this side.
        is_server: whether the other side has connected to this one.
    """

    def __init__(self, sock: StreamSocket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._sock = sock
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._received = memoryview(bytearray(FIRST_BYTES))
        self._unsent = memoryview(b"")  # encrypted bytes
        self._taken = 0  # bytes of the caller in `_unsent`
        self._is_authenticated = False

    def authenticate(self) -> Steps[None]:
        """Complete the handshake.

        Raises:
            AuthenticationFailed: the certificate of the other side is not accepted.
            OSError: the socket has ended.
        """
        while not self._continue_handshake():
            yield READ  # also if more has arrived, so that the deadline is checked
            self._receive()
        self._is_authenticated = True

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send bytes, and return how many.

        Raises:
            BlockingIOError: the operating system takes no more for now; the next call must begin with the same bytes.
            OSError: the socket has ended.
        """
        if not self._unsent:
            self._taken = self._encrypt(memoryview(data)[:BATCH_BYTES])
        while self._unsent:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        return self._taken

    def recv(self, nbytes: int) -> bytes:
        """Receive at most this many bytes.

        Raises:
            BlockingIOError: nothing has arrived.
            OSError: the socket has ended.
        """
        buffer = bytearray(nbytes)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def recv_into(self, buffer: memoryview) -> int:
        """Receive bytes into memory, and return how many.

        Fewer than the memory holds mean that nothing is left here: the selector reports what comes next.

        Raises:
            BlockingIOError: nothing has arrived.
            OSError: the socket has ended.
        """
        count = self._decrypt(buffer)
        if not count and self._receive():
            count = self._decrypt(buffer)
        if not count:
            raise BlockingIOError
        return count

    def fileno(self) -> int:
        """Return the file descriptor; -1 after `close`."""
        return self._sock.fileno()

    def setblocking(self, is_blocking: bool) -> None:
        """Set whether calls wait."""
        self._sock.setblocking(is_blocking)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket."""
        self._sock.setsockopt(level, option, value)

    def getpeername(self) -> Any:
        """Return the address of the other side."""
        return self._sock.getpeername()

    def getsockname(self) -> Any:
        """Return the address of this side."""
        return self._sock.getsockname()

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _continue_handshake(self) -> bool:
        """Send the next message of the handshake, or an alert; return whether the handshake is complete."""
        is_complete = False
        try:
            self._tls.do_handshake()
            is_complete = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            with suppress(OSError):  # the other side may have closed the socket
                self._sock.send(self._outgoing.read())
            raise AuthenticationFailed(_explain(error)) from error
        self._sock.send(self._outgoing.read())  # a new socket has room for it
        return is_complete

    def _encrypt(self, data: memoryview) -> int:
        """Encrypt these bytes, and return how many there are."""
        count = 0
        while count < len(data):
            count += self._tls.write(data[count:])
        self._unsent = memoryview(self._outgoing.read())
        return count

    def _decrypt(self, buffer: memoryview) -> int:
        """Decrypt what has been received, as far as it fits into the memory, and return the number of bytes."""
        count = 0
        with suppress(ssl.SSLWantReadError):
            while count < len(buffer):
                count += self._tls.read(len(buffer) - count, buffer[count:])  # type: ignore[operator]  # not bytes
        return count

    def _receive(self) -> bool:
        """Receive encrypted bytes; return whether any have arrived.

        Raises:
            OSError: the socket has ended.
        """
        try:
            count = self._sock.recv_into(self._received)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError("the other process has closed the connection")
        self._incoming.write(self._received[:count])
        if count == len(self._received) == FIRST_BYTES and self._is_authenticated:
            self._received = memoryview(bytearray(BATCH_BYTES))
        return True


def _explain(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not that of this job, {OTHER_SECRET}"
    if error.reason == "TLSV1_ALERT_UNKNOWN_CA":
        return f"it does not accept the certificate of this process, {OTHER_SECRET}"
    return (error.reason or str(error)).lower().replace("_", " ")
