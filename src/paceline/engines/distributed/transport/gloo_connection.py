"""Connection between two processes on a gloo process group."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from paceline.engines.distributed.transport import headers
from paceline.engines.distributed.transport.connection import Buckets, Connection, ConnectionLost
from paceline.engines.distributed.transport.gloo import (
    NO_TIMEOUT,
    PROBE_TAG,
    disconnect_pair,
    dist,
    gloo_group,
    raising_connection_lost,
)

HEADER_TAG, CONTENT_TAG, END_OF_CONTENT_TAG, END_OF_BUCKETS_TAG = range(PROBE_TAG + 1, PROBE_TAG + 5)
BUCKET_TAG = END_OF_BUCKETS_TAG + 1  # and the next ones, one for each bucket
POSTED_HEADERS = 3  # receives posted ahead: most answers are at most two messages, and one receive stays posted


class GlooConnection(Connection):
    """Connection on a gloo process group of two, so that its end affects no other process.

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
        super().__init__()
        with raising_connection_lost():
            self._group = gloo_group(
                dist.PrefixStore(key, store), side, 2, device, keepalive_timeout_s=keepalive_timeout_s
            )
        self._peer = 1 - side
        self._sending: list[tuple[Any, Tensor]] = []  # gloo does not keep the memory alive
        self._answerable = 0  # how many of them the next answer confirms
        self._send_lock = threading.Lock()
        self._post_lock = threading.Lock()
        self._posted_headers: deque[tuple[Any, Tensor]] = deque()
        self._buffers: list[Tensor] = []  # of buckets
        self._posted_buckets: list[Any] = []  # None where no receive is posted
        self._end_of_buckets: Any = None

    def _send(self, header: Tensor, contents: Sequence[Tensor], buckets: Buckets, *, will_be_answered: bool) -> None:
        with self._send_lock, suppress(RuntimeError):
            self._post_receives()
            self._start_send(header, HEADER_TAG)
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

    def _recv_header(self) -> Tensor:
        with raising_connection_lost():
            with self._post_lock:
                if not self._posted_headers:
                    self._post_header()
                arriving, numbers = self._posted_headers.popleft()
            arriving.wait(NO_TIMEOUT)
        return numbers

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
