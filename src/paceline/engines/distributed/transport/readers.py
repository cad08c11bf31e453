"""Readers of the two sockets of a connection: messages, and tensors that go straight into their memory."""

from __future__ import annotations

import struct
from typing import Protocol

from paceline.engines.distributed.transport.stream import StreamReader

MESSAGE = struct.Struct("!IQ")  # bytes of the message; tensors that were sent before it
TENSOR = struct.Struct("!IQ")  # number of the bucket, or STATE; bytes that follow
STATE = 0xFFFFFFFF  # tensor of a `StateMessage`
MAX_MESSAGE_BYTES = 1 << 26


class ReadingConnection(Protocol):
    """Connection for which the readers read; the methods are those of `Connection`."""

    def is_full(self) -> bool:
        """Return whether no further message is read for now."""

    def on_bytes(self) -> None:
        """Record that the other process is alive."""

    def on_message(self, content: memoryview, tensors: int) -> None:
        """Handle a message and the number of tensors that were sent before it."""

    def memory_of(self, number: int) -> memoryview | None:
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

    def on_bytes(self, count: int) -> None:
        """Deliver the messages that are complete."""
        self._connection.on_bytes()
        self._stop += count
        try:
            while (needed := self._deliver_one()) == 0:
                pass
        except ValueError as error:
            self._connection.end(f"invalid message: {error}")
            return
        self._make_room(needed)

    def on_end(self, reason: str) -> None:
        """Report the end of the socket."""
        self._connection.on_stream_end(reason, is_control=True)

    def _deliver_one(self) -> int:
        """Deliver a message and return 0; if it is not complete, return its bytes."""
        received = self._memory[self._start : self._stop]
        if len(received) < MESSAGE.size:
            return MESSAGE.size
        nbytes, tensors = MESSAGE.unpack_from(received)
        if not 0 < nbytes <= MAX_MESSAGE_BYTES:
            raise ValueError(f"{nbytes} bytes")
        whole = MESSAGE.size + int(nbytes)
        if len(received) < whole:
            return whole
        self._start += whole
        self._connection.on_message(received[MESSAGE.size : whole], tensors)
        return 0

    def _make_room(self, needed: int) -> None:
        """Move an incomplete message to the beginning of memory that has room for it."""
        rest = bytes(self._memory[self._start : self._stop])
        if needed > len(self._memory):
            self._memory = memoryview(bytearray(needed))
        self._memory[: len(rest)] = rest
        self._start, self._stop = 0, len(rest)


class TensorReader(StreamReader):
    """Reader of tensors, each into its memory."""

    def __init__(self, connection: ReadingConnection) -> None:
        self._connection = connection
        self._frame = memoryview(bytearray(TENSOR.size))
        self._unread = self._frame
        self._is_frame = True  # else a tensor is read
        self._announced: tuple[int, int] | None = None  # number and bytes of a tensor whose memory is not known yet

    def next_buffer(self) -> memoryview | None:
        """Return the rest of the frame or of the tensor; None while its memory is not known."""
        if self._announced is not None:
            try:
                self._find_memory(*self._announced)
            except ValueError as error:
                self._connection.end(f"invalid tensor: {error}")
        return self._unread or None

    def on_bytes(self, count: int) -> None:
        """Find the memory of a tensor after its frame, and report the tensor when it is complete."""
        self._connection.on_bytes()
        self._unread = self._unread[count:]
        if self._unread:
            return
        if self._is_frame:
            self._announced = TENSOR.unpack(self._frame)
        else:
            self._finish()

    def on_end(self, reason: str) -> None:
        """Report the end of the socket."""
        self._connection.on_stream_end(reason, is_control=False)

    def _finish(self) -> None:
        self._unread = self._frame
        self._is_frame = True
        self._connection.on_tensor()

    def _find_memory(self, number: int, nbytes: int) -> None:
        memory = self._connection.memory_of(number)
        if memory is None:
            return
        if len(memory) != nbytes:
            raise ValueError(f"{nbytes} bytes, but {len(memory)} were expected")
        self._announced = None
        self._unread = memory
        self._is_frame = False
        if not nbytes:
            self._finish()
