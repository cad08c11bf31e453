"""Readers of the two sockets of a connection: messages, and tensors that go straight into their memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Protocol

from paceline.engines.distributed.transport.stream import StreamReader

MESSAGE = struct.Struct("!IIQ")  # bytes of the message; bytes of small buckets after it; tensors sent before it
TENSOR = struct.Struct("!IQ")  # number of the bucket, or STATE; bytes that follow
STATE = 0xFFFFFFFF  # tensor of a `StateMessage`
AHEAD_BYTES = 1 << 12
SMALL_BYTES = 1 << 13  # of all buckets of a message, with their frames, that are sent with it
MAX_MESSAGE_BYTES = 1 << 26


class ReadingConnection(Protocol):
    """Connection for which the readers read; the methods are those of `Connection`."""

    def is_full(self) -> bool:
        """Return whether no further message is read for now."""

    def on_bytes(self) -> None:
        """Record that the other process is alive."""

    def on_message(self, content: memoryview, buckets: memoryview, tensors: int) -> None:
        """Handle a message, the small buckets that came with it, and the number of tensors that were sent before it."""

    def memory_of(self, number: int, nbytes: int) -> memoryview | None:
        """Return the memory of the next tensor; None if it is not known yet."""

    def on_tensor(self) -> None:
        """Handle that a tensor has arrived."""

    def on_stream_end(self, reason: str, *, is_control: bool) -> None:
        """Handle the end of one socket."""

    def end(self, reason: str) -> None:
        """Close both sockets."""


class MessageReader(StreamReader):
    """Reader of messages, several of which may arrive together."""

    def __init__(self, connection: ReadingConnection) -> None:
        self._connection = connection
        self._memory = memoryview(bytearray(1 << 16))
        self._start = self._stop = 0  # of what is not delivered yet

    def next_buffer(self) -> memoryview | None:
        """Return the rest of the memory; None while messages wait."""
        if self._connection.is_full():
            return None
        return self._memory[self._stop :]

    def bytes_to_come(self) -> int:
        """Return 1: a message may have any size."""
        return 1

    def on_bytes(self, count: int) -> None:
        """Deliver the messages that are complete."""
        self._connection.on_bytes()
        self._stop += count
        try:
            while self._deliver_one():
                pass
        except ValueError as error:
            self._connection.end(f"invalid message: {error}")
            return
        self._make_room()

    def on_end(self, reason: str) -> None:
        """Report the end of the socket."""
        self._connection.on_stream_end(reason, is_control=True)

    def _deliver_one(self) -> bool:
        """Deliver a message; return False if it is not complete."""
        received = self._memory[self._start : self._stop]
        if len(received) < MESSAGE.size:
            return False
        nbytes, buckets_nbytes, tensors = MESSAGE.unpack_from(received)
        if not 0 < nbytes <= MAX_MESSAGE_BYTES or buckets_nbytes > SMALL_BYTES:
            raise ValueError(f"{nbytes} bytes and buckets of {buckets_nbytes}")
        content = MESSAGE.size + int(nbytes)
        whole = content + int(buckets_nbytes)
        if len(received) < whole:
            return False
        self._start += whole
        self._connection.on_message(received[MESSAGE.size : content], received[content:whole], tensors)
        return True

    def _make_room(self) -> None:
        """Move an incomplete message to the beginning of the memory, or to twice as much if it fills all of it.

        So the memory depends on the bytes that have arrived, and not on the size that the other side claims.
        """
        if self._start == self._stop:
            self._start = self._stop = 0
        if self._start == 0 and self._stop < len(self._memory):
            return
        rest = bytes(self._memory[self._start : self._stop])
        if len(rest) == len(self._memory):
            self._memory = memoryview(bytearray(2 * len(rest)))
        self._memory[: len(rest)] = rest
        self._start = 0
        self._stop = len(rest)


class TensorReader(StreamReader):
    """Reader of tensors, each into its memory; only its first bytes are read together with its frame, and copied."""

    def __init__(self, connection: ReadingConnection) -> None:
        self._connection = connection
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._start = self._stop = 0  # of what is read ahead and not used yet
        self._unread: memoryview | None = None  # memory of the tensor that is read
        self._announced: tuple[int, int] | None = None  # number and bytes of a tensor whose memory is not known yet

    def next_buffer(self) -> memoryview | None:
        """Return the rest of a tensor, or memory to read ahead; None while the memory of a tensor is not known."""
        if self._announced is not None:
            self._use_ahead()
        if self._announced is not None:
            return None
        return self._unread or self._ahead[self._stop :]

    def bytes_to_come(self) -> int:
        """Return the number of bytes that are left of a tensor, or 1."""
        return len(self._unread or b".")

    def on_bytes(self, count: int) -> None:
        """Record bytes of a tensor, or frames with the bytes of their tensors, and report complete tensors."""
        self._connection.on_bytes()
        if self._unread:
            self._fill(count)
        else:
            self._stop += count
            self._use_ahead()

    def on_end(self, reason: str) -> None:
        """Report the end of the socket."""
        self._connection.on_stream_end(reason, is_control=False)

    def _use_ahead(self) -> None:
        """Use all complete frames that were read ahead, and what there is of their tensors."""
        try:
            while self._find_memory():
                pass
        except ValueError as error:
            self._connection.end(f"invalid tensor: {error}")

    def _find_memory(self) -> bool:
        """Read a frame and the beginning of its tensor; return whether there may be another frame."""
        if self._announced is None:
            if self._stop - self._start < TENSOR.size:
                rest = bytes(self._ahead[self._start : self._stop])
                self._ahead[: len(rest)] = rest
                self._start = 0
                self._stop = len(rest)
                return False
            self._announced = TENSOR.unpack_from(self._ahead, self._start)
            self._start += TENSOR.size
        number, nbytes = self._announced
        memory = self._connection.memory_of(number, nbytes)
        if memory is None:
            return False
        self._announced = None
        count = min(nbytes, self._stop - self._start)
        memory[:count] = self._ahead[self._start : self._start + count]
        self._start += count
        self._unread = memory
        self._fill(count)
        return True

    def _fill(self, count: int) -> None:
        """Record that so many bytes of the tensor have been read."""
        assert self._unread is not None
        self._unread = self._unread[count:]
        if not self._unread:
            self._unread = None
            self._connection.on_tensor()


def split_small_buckets(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each bucket that came with a message.

    Raises:
        ValueError: the last bucket is not complete.

    >>> list(split_small_buckets(TENSOR.pack(7, 2) + b"ab" + TENSOR.pack(8, 0)))
    [(7, b'ab'), (8, b'')]
    """
    start = 0
    while start < len(content):
        if start + TENSOR.size > len(content):
            raise ValueError("incomplete frame")
        number, nbytes = TENSOR.unpack_from(content, start)
        start += TENSOR.size
        yield number, content[start : start + nbytes]
        start += nbytes
