"""Connection between two processes: the interface that all transports implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from paceline.engines.distributed.transport import headers, messages
from paceline.engines.distributed.transport.headers import ControlHeader, DataMessage
from paceline.engines.distributed.transport.messages import ControlMessage, ControlStruct, StateMessage

Message = DataMessage | ControlMessage
Buckets = Sequence[tuple[int, Tensor]] | None  # numbered

UNAUTHENTICATED_BYTES = 1 << 10  # longest control message of a peer that is not authenticated
AUTHENTICATED_BYTES = 1 << 26


class ConnectionLost(Exception):  # noqa: N818  # every connection ends with the run
    """The connection has ended, or invalid data arrived over it."""


class Connection(ABC):
    """Connection to one other process.

    Any thread may send; one thread receives. Memory that is sent must not change until the other side has answered.
    Every method that receives raises ConnectionLost when the connection has ended or a message is invalid.
    """

    def __init__(self) -> None:
        self._max_bytes = UNAUTHENTICATED_BYTES

    def lift_size_limit(self) -> None:
        """Allow long control messages, and those with tensors: the peer is authenticated."""
        self._max_bytes = AUTHENTICATED_BYTES

    # --- sending ------------------------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        contents: Sequence[Tensor] = (),
        *,
        buckets: Buckets = None,
        will_be_answered: bool = False,
    ) -> None:
        """Start to send a message and the tensors that follow it; the next `recv` reports a lost connection.

        Args:
            message: message to send.
            contents: tensors that follow it.
            buckets: last numbered buckets that belong to it; the other side has posted receives for them.
            will_be_answered: whether an answer will come, which confirms that everything has been received.
        """
        header: DataMessage
        if isinstance(message, ControlStruct):
            content, tensors = messages.encode(message)
            header = ControlHeader(content.numel())
            contents = [content, *(as_bytes(each) for each in tensors if each.numel()), *contents]
        else:
            header = message
        self._send(headers.encode(header), contents, buckets, will_be_answered=will_be_answered)

    @abstractmethod
    def _send(self, header: Tensor, contents: Sequence[Tensor], buckets: Buckets, *, will_be_answered: bool) -> None:
        """Start to send an encoded header and what follows it."""

    @abstractmethod
    def send_bucket(self, number: int, bucket: Tensor) -> None:
        """Start to send a bucket whose message, which will be answered, follows later."""

    @abstractmethod
    def release_sent(self) -> None:
        """Release the memory of everything up to the message whose answer has arrived."""

    # --- receiving ----------------------------------------------------------------------------------------

    def recv(self) -> Message:
        """Wait for a message."""
        numbers = self._recv_header()
        try:
            header = headers.decode(numbers)
            return self._recv_control(header) if isinstance(header, ControlHeader) else header
        except ValueError as error:
            raise ConnectionLost(f"invalid message: {error}") from error

    @abstractmethod
    def _recv_header(self) -> Tensor:
        """Wait for an encoded header."""

    @abstractmethod
    def recv_into(self, contents: Tensor) -> None:
        """Wait for a tensor that follows a message."""

    @abstractmethod
    def post_buckets(self, buffers: Sequence[Tensor]) -> None:
        """Post receives for numbered buckets into this memory, so that they need not wait for an answer.

        The other side sends a bucket only when its buffer is free, which follows from earlier messages.
        """

    @abstractmethod
    def recv_buckets(self, numbers: Iterable[int]) -> None:
        """Wait until the buckets of a message are in their buffers, which are reused after the next `send`."""

    @abstractmethod
    def recv_early_buckets(self, numbers: Iterable[int]) -> None:
        """Wait for buckets that were sent before their message; there may be others."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection now; pending operations fail on both sides."""

    def _recv_control(self, header: ControlHeader) -> ControlMessage:
        if not 0 < header.nbytes <= self._max_bytes:
            raise ValueError(f"control message of {header.nbytes} bytes")
        content = torch.zeros(header.nbytes, dtype=torch.uint8)
        self.recv_into(content)
        message = messages.decode(content)
        if isinstance(message, StateMessage):
            if self._max_bytes == UNAUTHENTICATED_BYTES:
                raise ValueError("tensors of an unauthenticated peer")
            tensors = {name: self._recv_tensor(*described) for name, described in message.tensors.items()}
            return msgspec.structs.replace(message, tensors=tensors)
        return message

    def _recv_tensor(self, dtype: str, shape: list[int]) -> Tensor:
        tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            self.recv_into(as_bytes(tensor))
        return tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as its bytes."""
    return tensor.reshape(-1).view(torch.uint8)
