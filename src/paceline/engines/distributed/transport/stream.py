"""Stream: one non-blocking socket, whose bytes are read straight into the memory where they belong."""

from __future__ import annotations

import selectors
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from paceline.engines.distributed.transport.socket_loop import SocketLoop
from paceline.recording.metrics.network_counters import NetworkCounters

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
FIRST_BYTES = 1 << 17  # that the thread of the sender writes itself
JOINED_BYTES = 1 << 14  # of small parts that are sent together
PIECE_BYTES = 1 << 22  # of one system call
TURN_BYTES = 1 << 22  # that one socket reads or writes before the others have their turn
LOW_WATER_BYTES = 1 << 20  # that must have arrived before the thread wakes up, if at least as many are to come
RECORD_BYTES = 1 << 15  # of an incomplete TLS record, which has arrived but is not read, and its frame


class StreamSocket(Protocol):
    """Connected socket; the methods are those of `socket.socket`."""

    def send(self, data: bytes | bytearray | memoryview, /) -> int:
        """Send bytes, and return how many; after a `BlockingIOError` the next call begins with the same bytes."""

    def recv(self, nbytes: int, /) -> bytes:
        """Receive at most this many bytes."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receive bytes into memory, and return how many; fewer than it holds are all that the process has got."""

    def fileno(self) -> int:
        """Return the file descriptor; -1 after `close`."""

    def setblocking(self, is_blocking: bool, /) -> None:
        """Set whether calls wait."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """Set an option of the socket."""

    def getpeername(self) -> Any:
        """Return the address of the other side."""

    def getsockname(self) -> Any:
        """Return the address of this side."""

    def close(self) -> None:
        """Close the socket."""


class StreamReader(ABC):
    """Receiver of the bytes of a stream; called in the thread of the loop."""

    @abstractmethod
    def next_buffer(self) -> memoryview | None:
        """Return memory for the next bytes, not empty; None to read nothing until `Stream.resume`."""

    @abstractmethod
    def bytes_to_come(self) -> int:
        """Return the number of bytes that will come in any case, >= 1; with fewer there is nothing to do."""

    @abstractmethod
    def on_bytes(self, count: int) -> None:
        """Handle that this many bytes, at least one, have been written to the memory of `next_buffer`."""

    @abstractmethod
    def on_end(self, reason: str) -> None:
        """Handle the end of the stream, once."""


class Stream:
    """Non-blocking socket with a queue of bytes to send.

    Args:
        loop: thread that reads and writes.
        sock: socket on which both sides are authenticated.
        reader: receiver of what arrives.
        counters: counts of bytes.
    """

    def __init__(self, loop: SocketLoop, sock: StreamSocket, reader: StreamReader, counters: NetworkCounters) -> None:
        self._loop = loop
        self._sock = sock
        self._reader = reader
        self._counters = counters
        self._unsent: deque[memoryview] = deque()
        self._lock = threading.Lock()  # OpenSSL allows one thread at a time
        self._watched = 0  # events
        self._low_water_bytes = 1
        self._has_ended = False
        sock.setblocking(False)

    @property
    def is_sending(self) -> bool:
        """Whether bytes are queued that the operating system has not taken yet."""
        return bool(self._unsent)

    @property
    def unsent(self) -> int:
        """Number of parts that are queued."""
        return len(self._unsent)

    def send(self, parts: Sequence[memoryview]) -> None:
        """Start to send bytes, which must not change until they have arrived; any thread may use this."""
        with self._lock:
            was_idle = not self._unsent
            self._unsent.extend(parts)
            if was_idle and not self._has_ended:
                self._send_some(FIRST_BYTES)  # most messages need no change of threads
            if not self._unsent:
                return
        self._loop.call(self._on_ready)

    def resume(self) -> None:
        """Read, and ask the reader for memory again; any thread may use this."""
        self._loop.call(self._on_ready)

    def end(self, reason: str) -> None:
        """Close the socket and report the end; in the thread of the loop only."""
        if self._has_ended:
            return
        self._has_ended = True
        self._loop.watch(self._sock, 0, self._on_ready)
        with self._lock:
            self._sock.close()
            self._unsent.clear()
        self._reader.on_end(reason)

    def _on_ready(self) -> None:
        if self._has_ended:
            return
        try:
            has_more = self._recv_some()
            if self._unsent:
                with self._lock:
                    has_more |= self._send_some(TURN_BYTES)
        except OSError as error:
            self.end(error.strerror or str(error))
            return
        if has_more:
            self._loop.call(self._on_ready)
        self._watch()

    def _recv_some(self) -> bool:
        """Receive what has arrived; return whether the turn of the others has come before everything was received.

        Raises:
            OSError: the stream has ended.
        """
        left_bytes = TURN_BYTES
        while left_bytes > 0:
            buffer = None if self._has_ended else self._reader.next_buffer()
            if buffer is None:
                return False
            buffer = buffer[:PIECE_BYTES]
            try:
                with self._lock:
                    count = self._sock.recv_into(buffer)
            except BlockingIOError:
                return False
            if not count:
                raise OSError("the other process has closed the connection")
            left_bytes -= count
            self._counters.on_received(count)
            self._reader.on_bytes(count)
            if count < len(buffer):
                return False
        return True

    def _send_some(self, most_bytes: int) -> bool:
        """Send what the socket takes, with the lock held; return whether it would take more.

        An error is not raised here but by the next receive, so that what the other side has sent is read first.
        """
        while self._unsent and not self._has_ended:
            if most_bytes <= 0:
                return True
            try:
                count = self._sock.send(self._next_piece())
            except BlockingIOError:
                return False
            except OSError:
                self._unsent.clear()
                return False
            most_bytes -= count
            self._counters.on_sent(count)
            self._remove(count)
        return False

    def _next_piece(self) -> bytearray | memoryview:
        """Return the bytes to send next: a piece of a large part, or small parts together."""
        first = self._unsent[0]
        if len(first) >= JOINED_BYTES or len(self._unsent) == 1:
            return first[:PIECE_BYTES]
        joined = bytearray()
        for part in self._unsent:
            joined += part[: JOINED_BYTES - len(joined)]
            if len(joined) == JOINED_BYTES:
                break
        return joined

    def _remove(self, count: int) -> None:
        """Remove bytes that have been sent from the queue."""
        while count >= len(self._unsent[0]):
            count -= len(self._unsent.popleft())
            if not self._unsent:
                return
        self._unsent[0] = self._unsent[0][count:]

    def _watch(self) -> None:
        if self._has_ended:
            return
        events = (READ if self._reader.next_buffer() is not None else 0) | (WRITE if self._unsent else 0)
        if events & READ:
            self._set_low_water(max(1, min(LOW_WATER_BYTES, self._reader.bytes_to_come() - RECORD_BYTES)))
        if events != self._watched:
            self._loop.watch(self._sock, events, self._on_ready)
            self._watched = events

    def _set_low_water(self, nbytes: int) -> None:
        """Wake up for this many bytes: each piece of a large tensor costs a system call and a change of threads."""
        if nbytes != self._low_water_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low_water_bytes = nbytes
