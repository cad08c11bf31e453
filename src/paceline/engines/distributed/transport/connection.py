"""Connection between two processes: a gloo process group of two, so that its end affects no other process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import Tensor, distributed

from paceline.engines.distributed.transport import headers, messages
from paceline.engines.distributed.transport.headers import ControlHeader, DataMessage
from paceline.engines.distributed.transport.keepalive import open_sockets, published_addresses, set_keepalive_timeout
from paceline.engines.distributed.transport.messages import ControlMessage, ControlStruct, StateMessage

dist: Any = distributed  # it does not export the types of all its names
Message = DataMessage | ControlMessage

CONNECT_TIMEOUT = timedelta(seconds=20)
NO_TIMEOUT = timedelta(days=365)  # gloo closes a pair on which a receive has timed out
IMMEDIATELY = timedelta(milliseconds=1)
HEADER_TAG, CONTENT_TAG, PROBE_TAG, END_OF_CONTENT_TAG, END_OF_BUCKETS_TAG = 1, 2, 3, 4, 5
BUCKET_TAG = 6  # and the next ones, one for each bucket
UNAUTHENTICATED_BYTES = 1 << 10  # longest control message of a peer that is not authenticated
AUTHENTICATED_BYTES = 1 << 26
POSTED_HEADERS = 3  # receives posted ahead: most answers are at most two messages, and one receive stays posted


class ConnectionLost(Exception):  # noqa: N818  # every connection ends with the run
    """The connection has ended, or invalid data arrived over it."""


@contextmanager
def raising_connection_lost() -> Iterator[None]:
    """Raise ConnectionLost where gloo raises any error."""
    try:
        yield
    except RuntimeError as error:  # torch raises several subclasses
        raise ConnectionLost(shorten(str(error))) from error


def gloo_group(
    store: Any, rank: int, size: int, device: Any, timeout: timedelta = CONNECT_TIMEOUT, threads: int = 1
) -> Any:
    """Return a process group on gloo.

    Args:
        store: store in which exactly the processes of the group meet.
        rank: rank of this process in the group, from 0.
        size: number of processes.
        device: gloo device on the address of this host.
        timeout: longest wait for each action of another process.
        threads: threads that carry out the operations.

    Raises:
        RuntimeError: a process did not connect.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [device]
    options._threads = threads
    return dist.ProcessGroupGloo(store, rank, size, options)


def disconnect_pair(group: Any, peer: int) -> None:
    """Close the connection to one process of a group now; pending operations fail on both sides. Thread-safe."""
    with suppress(RuntimeError):  # gloo closes a pair on which a wait has timed out, and in no other way
        post_probe(group, peer).wait(IMMEDIATELY)


def post_probe(group: Any, peer: int) -> Any:
    """Post a receive that no process answers.

    Raises:
        RuntimeError: the two processes are no longer connected.
    """
    return group.recv([torch.zeros(1)], peer, PROBE_TAG)


class Connection:
    """Connection to one other process.

    Any thread may send; one thread receives. Memory that is sent must not change until the other side has answered.

    Receives are posted before something is sent, for its answer. After a message has arrived they are posted only
    if no other receive is. gloo notifies the other side of each receive. If a thread is still sending there, the
    gloo thread spins until it has finished, on a core that the sender may need.

    An empty message follows each content and each set of buckets, and is awaited first. gloo does not report the end
    of a connection to a receiver that has part of a message; an empty message has no parts.

    Args:
        store: store in which the two processes meet; a client of its own.
        key: key in the store that only these two use.
        side: 0 for the server, 1 for the peer that connects to it.
        device: gloo device on the address of this host.
        keepalive_timeout_s: seconds without any answer from the other host after which the connection ends, >= 1.

    Raises:
        ConnectionLost: the other process did not connect.
    """

    def __init__(self, store: Any, key: str, side: int, device: Any, keepalive_timeout_s: float) -> None:
        store = dist.PrefixStore(key, store)
        before = open_sockets()
        with raising_connection_lost():
            self._group = gloo_group(store, side, 2, device)
            set_keepalive_timeout(before, keepalive_timeout_s, published_addresses(store, 2))
        self._peer = 1 - side
        self._sending: list[tuple[Any, Tensor]] = []  # gloo does not keep the memory alive
        self._answerable = 0  # how many of them the next answer confirms
        self._send_lock = threading.Lock()
        self._post_lock = threading.Lock()
        self._posted_headers: deque[tuple[Any, Tensor]] = deque()
        self._buffers: list[Tensor] = []  # of buckets
        self._posted_buckets: list[Any] = []  # None where no receive is posted
        self._end_of_buckets: Any = None
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
        buckets: Sequence[tuple[int, Tensor]] | None = None,
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
        with self._send_lock, suppress(RuntimeError):
            self._post_receives()
            self._start_send(headers.encode(header), HEADER_TAG)
            for number, bucket in buckets or ():
                self._start_send(bucket, BUCKET_TAG + number)
            if buckets is not None:
                self._start_send(_empty(), END_OF_BUCKETS_TAG)
            for each in contents:
                self._start_send(each, CONTENT_TAG)
                self._start_send(_empty(), END_OF_CONTENT_TAG)
            if will_be_answered:
                self._answerable = len(self._sending)

    def send_bucket(self, number: int, bucket: Tensor) -> None:
        """Start to send a bucket whose message, which will be answered, follows later."""
        with self._send_lock, suppress(RuntimeError):
            self._start_send(bucket, BUCKET_TAG + number)

    def release_sent(self) -> None:
        """Release the memory of everything up to the message whose answer has arrived.

        A send that the other side has received completes. Waiting for one that the end of the connection has
        overtaken could take forever with gloo.
        """
        with self._send_lock:
            done, self._sending = self._sending[: self._answerable], self._sending[self._answerable :]
            self._answerable = 0
        for work, _ in done:
            with raising_connection_lost():
                work.wait(NO_TIMEOUT)

    # --- receiving ----------------------------------------------------------------------------------------

    def recv(self) -> Message:
        """Wait for a message.

        Raises:
            ConnectionLost: the connection has ended, or the message is invalid.
        """
        with raising_connection_lost():
            with self._post_lock:
                if not self._posted_headers:
                    self._post_header()
                arriving, numbers = self._posted_headers.popleft()
            arriving.wait(NO_TIMEOUT)
        try:
            header = headers.decode(numbers)
            return self._recv_control(header) if isinstance(header, ControlHeader) else header
        except ValueError as error:
            raise ConnectionLost(f"invalid message: {error}") from error

    def recv_into(self, contents: Tensor) -> None:
        """Wait for a tensor that follows a message."""
        with raising_connection_lost():
            arriving = self._group.recv([contents], self._peer, CONTENT_TAG)
            self._group.recv([_empty()], self._peer, END_OF_CONTENT_TAG).wait(NO_TIMEOUT)
            arriving.wait(NO_TIMEOUT)

    def post_buckets(self, buffers: Sequence[Tensor]) -> None:
        """Post receives for numbered buckets into this memory, so that they need not wait for an answer.

        The other side sends a bucket only when its buffer is free, which follows from earlier messages.
        """
        with raising_connection_lost(), self._post_lock:
            self._buffers = list(buffers)
            self._posted_buckets = [None] * len(buffers)
            self._post_missing_buckets()

    def recv_buckets(self, numbers: Iterable[int]) -> None:
        """Wait until the buckets of a message are in their buffers, which are reused after the next `send`."""
        with raising_connection_lost():
            with self._post_lock:
                if self._end_of_buckets is None:
                    self._post_missing_buckets()
                end, self._end_of_buckets = self._end_of_buckets, None
            end.wait(NO_TIMEOUT)
        self.recv_early_buckets(numbers)

    def recv_early_buckets(self, numbers: Iterable[int]) -> None:
        """Wait for buckets that were sent before their message; there may be others."""
        for number in numbers:
            if number >= len(self._buffers):
                raise ConnectionLost(f"invalid bucket {number}")
            with raising_connection_lost():
                with self._post_lock:
                    arriving = self._posted_buckets[number] or self._post_bucket(number)
                    self._posted_buckets[number] = None
                arriving.wait(NO_TIMEOUT)

    def close(self) -> None:
        """Close the connection now; pending operations fail on both sides."""
        disconnect_pair(self._group, self._peer)

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

    def _post_receives(self) -> None:
        """Post the receives for the answer to what is sent now."""
        with self._post_lock:
            while len(self._posted_headers) < POSTED_HEADERS:
                self._post_header()
            self._post_missing_buckets()

    def _post_header(self) -> None:
        numbers = headers.empty_header()
        self._posted_headers.append((self._group.recv([numbers], self._peer, HEADER_TAG), numbers))

    def _post_missing_buckets(self) -> None:
        self._posted_buckets = [each or self._post_bucket(number) for number, each in enumerate(self._posted_buckets)]
        if self._buffers and self._end_of_buckets is None:
            self._end_of_buckets = self._group.recv([_empty()], self._peer, END_OF_BUCKETS_TAG)

    def _post_bucket(self, number: int) -> Any:
        return self._group.recv([self._buffers[number]], self._peer, BUCKET_TAG + number)

    def _start_send(self, contents: Tensor, tag: int) -> None:
        self._sending.append((self._group.send([contents], self._peer, tag), contents))


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as its bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def shorten(reason: str) -> str:
    """Return an error message of gloo without its source position and without advice."""
    text = reason.rpartition("] ")[2] if reason.startswith("[/") else reason
    return text.partition(". This is")[0].partition("\n")[0]
