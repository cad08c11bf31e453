"""Connections as they were before TLS: gloo groups of two that meet in a TCPStore. Only `transport.py` uses them.

A message is a header of sixteen numbers; numbered buckets and an empty message follow it. Receives are posted ahead
when something is sent, and a thread of each connection waits for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

dist: Any = distributed  # it does not export the types of all its names

NUMBERS = 16  # in a header
HEADER_TAG, END_OF_BUCKETS_TAG = 2, 5
BUCKET_TAG = END_OF_BUCKETS_TAG + 1  # and the next ones, one for each bucket
POSTED_HEADERS = 3
CONNECT_TIMEOUT = timedelta(seconds=20)
NO_TIMEOUT = timedelta(days=365)  # gloo closes a pair on which a receive has timed out
IMMEDIATELY = timedelta(milliseconds=1)


class RemoteTask(NamedTuple):
    """Task of a worker, with a version as bucket 0."""

    draw: int
    version: int
    sends_version: bool
    run_s: float
    shard: int | None = None
    epoch: int | None = None
    number: int | None = None
    checksum: int | None = None


class RemoteTaskDone(NamedTuple):
    """The gradient of a task is complete."""

    draw: int
    resent: int
    busy_s: float
    loss: float
    samples: int
    squared_norm: float
    variance: float
    finite: bool
    compute_s: float


class CancelTask(NamedTuple):
    """Cancel the tasks of a worker up to this draw."""

    draw: int


class GradientReceived(NamedTuple):
    """Short answer to a task."""

    peer_id: int
    draw: int


Message = RemoteTask | RemoteTaskDone | CancelTask | GradientReceived
KINDS: list[type[Any]] = [RemoteTask, RemoteTaskDone, CancelTask, GradientReceived]
READ: dict[str, Callable[[float], object]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "int | None": lambda number: None if number != number else int(number),
}
FIELDS = [[READ[hint.__forward_arg__] for hint in kind.__annotations__.values()] for kind in KINDS]


def encode(message: Message) -> Tensor:
    """Return a message as float64 [NUMBERS]."""
    numbers = [nan if value is None else float(value) for value in message]
    padding = [0.0] * (NUMBERS - 1 - len(numbers))
    return torch.tensor([KINDS.index(type(message)), *numbers, *padding], dtype=torch.float64)


def decode(numbers: Tensor) -> Message:
    """Return the message of a header."""
    kind, *values = numbers.tolist()
    read = FIELDS[int(kind)]
    message: Message = KINDS[int(kind)](*[each(value) for each, value in zip(read, values, strict=False)])
    return message


class GlooLine:
    """Connection on a gloo process group of two.

    Args:
        store: store in which the two processes meet; a client of its own.
        key: key in the store that only these two use.
        side: 0 for the server, 1 for the peer that connects to it.
        host: address of this host.
    """

    def __init__(self, store: Any, key: str, side: int, host: str) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = CONNECT_TIMEOUT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._threads = 1
        self._group = dist.ProcessGroupGloo(dist.PrefixStore(key, store), side, 2, options)
        self._peer = 1 - side
        self._sending: list[tuple[Any, Tensor]] = []  # gloo does not keep the memory alive
        self._answerable = 0  # how many of them the next answer confirms
        self._send_lock = threading.Lock()
        self._post_lock = threading.Lock()
        self._posted_headers: deque[tuple[Any, Tensor]] = deque()
        self._buffers: list[Tensor] = []  # of buckets
        self._posted_buckets: list[Any] = []  # None where no receive is posted
        self._end_of_buckets: Any = None

    def send(self, message: Message, buckets: Sequence[tuple[int, Tensor]] = ()) -> None:
        """Start to send a message, to which an answer will come unless it is a `CancelTask`."""
        header = encode(message)
        with self._send_lock, suppress(RuntimeError):
            self._post_receives()
            self._start_send(header, HEADER_TAG)
            for number, bucket in buckets:
                self._start_send(bucket, BUCKET_TAG + number)
            if buckets:
                self._start_send(_empty(), END_OF_BUCKETS_TAG)
            if not isinstance(message, CancelTask):
                self._answerable = len(self._sending)

    def post_buckets(self, buffers: Sequence[Tensor]) -> None:
        """Post receives for numbered buckets into this memory."""
        with self._post_lock:
            self._buffers = list(buffers)
            self._posted_buckets = [None] * len(buffers)
            self._post_missing_buckets()

    def listen(self, on_message: Callable[[Message], None]) -> None:
        """Start a thread that calls a handler with each message, when its buckets have arrived, until `close`."""

        def receive() -> None:
            with suppress(RuntimeError):
                while True:
                    message = self._recv()
                    if isinstance(message, RemoteTask | RemoteTaskDone):
                        self._recv_buckets(range(len(self._buffers)))
                    if not isinstance(message, CancelTask):
                        self._release_sent()
                    on_message(message)

        threading.Thread(target=receive, daemon=True).start()

    def close(self) -> None:
        """Close the connection: gloo closes a pair on which a wait has timed out, and in no other way."""
        with suppress(RuntimeError):
            self._group.recv([torch.zeros(1)], self._peer, 1).wait(IMMEDIATELY)

    def _release_sent(self) -> None:
        """Release the memory of everything up to the message whose answer has arrived."""
        with self._send_lock:
            done, self._sending = self._sending[: self._answerable], self._sending[self._answerable :]
            self._answerable = 0
        for work, _ in done:
            work.wait(NO_TIMEOUT)

    def _recv(self) -> Message:
        with self._post_lock:
            if not self._posted_headers:
                self._post_header()
            arriving, numbers = self._posted_headers.popleft()
        arriving.wait(NO_TIMEOUT)
        return decode(numbers)

    def _recv_buckets(self, numbers: Iterable[int]) -> None:
        with self._post_lock:
            if self._end_of_buckets is None:
                self._post_missing_buckets()
            end, self._end_of_buckets = self._end_of_buckets, None
        end.wait(NO_TIMEOUT)
        for number in numbers:
            with self._post_lock:
                arriving = self._posted_buckets[number] or self._post_bucket(number)
                self._posted_buckets[number] = None
            arriving.wait(NO_TIMEOUT)

    def _post_receives(self) -> None:
        """Post the receives for the answer to what is sent now."""
        with self._post_lock:
            while len(self._posted_headers) < POSTED_HEADERS:
                self._post_header()
            self._post_missing_buckets()

    def _post_header(self) -> None:
        numbers = torch.zeros(NUMBERS, dtype=torch.float64)
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
