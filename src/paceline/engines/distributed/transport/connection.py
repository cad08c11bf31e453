"""A line between two processes: a process group of two, on gloo, so that its end concerns nobody else."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from paceline.engines.distributed.transport.keepalive import end_when_silent, published, sockets
from paceline.engines.distributed.transport.messages import Message, Text, decode, encode, header

dist: Any = distributed  # it does not export the types of all its names

CONNECT_TIMEOUT = timedelta(seconds=20)
FOREVER = timedelta(days=365)  # gloo closes a pair on which a receive has taken too long
AT_ONCE = timedelta(milliseconds=1)
HEADERS, CONTENTS, NOTHING, END_OF_CONTENTS, END_OF_PIECES = 1, 2, 3, 4, 5  # tags
PIECES = 6  # and those after it, one for each
TENSORS = "tensors"  # key of a text that has some beside it
SHORT_BYTES = 1 << 10  # what may be said before anybody knows who says it
LONG_BYTES = 1 << 26  # and afterwards
AHEAD = 3  # messages expected: as many as an answer mostly has, and one more, so that somebody always waits


class ConnectionLost(Exception):  # noqa: N818  # a line ends with every run
    """A line is at its end, or what came over it is no message."""


@contextmanager
def saying_when_broken() -> Iterator[None]:
    """Raise Broken where gloo raises whatever it does."""
    try:
        yield
    except RuntimeError as error:  # of whatever kind torch raises
        raise ConnectionLost(summarize_value(str(error))) from error


def gloo(store: Any, place: int, size: int, device: Any, timeout: timedelta = CONNECT_TIMEOUT, threads: int = 1) -> Any:
    """Return a process group on gloo.

    Args:
        store: where its processes find each other, and nobody else.
        place: of this process, from 0.
        size: how many they are.
        device: of gloo, on the address of this host.
        timeout: of each thing that another process has to do for it.
        threads: that work on what is begun.

    Raises:
        RuntimeError: somebody did not come.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [device]
    options._threads = threads
    return dist.ProcessGroupGloo(store, place, size, options)


def end_pair(group: Any, other: int) -> None:
    """End what connects two processes of a group at once, whoever waits on it, on both sides; from any thread."""
    with suppress(RuntimeError):  # gloo ends a pair on which a wait has timed out, and in no other way
        expect_nothing(group, other).wait(AT_ONCE)


def expect_nothing(group: Any, other: int) -> Any:
    """Expect what never comes from another process of a group.

    Raises:
        RuntimeError: the two are not connected any more.
    """
    return group.recv([torch.zeros(1)], other, NOTHING)


class Connection:
    """Sends to and receives from one other process.

    Any thread may send; one thread receives. What is sent stays as it is until the other side has answered.

    Receives are posted before something is sent, for the answer, and when something has come only if nothing else is
    expected. For gloo tells the other side of each, and if a thread is not quite through with sending there, gloo's own
    turns in circles until it is, on a core that the first may need.

    Behind contents and pieces comes an end, of no bytes, which is waited for first. For of the end of the line gloo
    tells nobody who has received a part of a message; and of nothing there is no part.

    Args:
        store: where the two find each other, a client of its own.
        key: that only these two use.
        side: 0 for the server, 1 for the worker.
        device: of gloo, on the address of this host.
        silence_s: seconds after which a host that does not answer any more is taken for gone, and the line ends.

    Raises:
        Broken: the other one did not come.
    """

    def __init__(self, store: Any, key: str, side: int, device: Any, silence_s: float) -> None:
        store = dist.PrefixStore(key, store)
        before = sockets()
        with saying_when_broken():
            self._group = gloo(store, side, 2, device)
            end_when_silent(before, silence_s, published(store, 2))
        self._other = 1 - side
        self._sending: list[tuple[Any, Tensor]] = []  # gloo neither waits for itself nor keeps the memory
        self._answerable = 0  # of them, up to the last one that will be answered
        self._lock = threading.Lock()
        self._posting = threading.Lock()
        self._headers: deque[tuple[Any, Tensor]] = deque()  # expected
        self._rooms: list[Tensor] = []  # of pieces
        self._arriving: list[Any] = []  # None where the room is not ready
        self._end_of_pieces: Any = None
        self._longest_text = SHORT_BYTES

    def trust(self) -> None:
        """Let long texts come, and such with tensors: it is known who says them."""
        self._longest_text = LONG_BYTES

    def send(
        self,
        message: Message,
        contents: Sequence[Tensor] = (),
        *,
        pieces: Sequence[tuple[int, Tensor]] | None = None,
        will_be_answered: bool = False,
    ) -> None:
        """Begin to send a message and what follows it; that the line is broken, the next receive tells.

        Args:
            message: to send.
            contents: that follow it.
            pieces: the last ones that belong to it, numbered: their rooms are ready at the other side.
            will_be_answered: whether there will be an answer, from which it is known that all of it has come.
        """
        with self._lock, suppress(RuntimeError):
            self._get_ready()
            self._begin(encode(message), HEADERS)
            for number, piece in pieces or ():
                self._begin(piece, PIECES + number)
            if pieces is not None:
                self._begin(_nothing(), END_OF_PIECES)
            for each in contents:
                self._begin(each, CONTENTS)
                self._begin(_nothing(), END_OF_CONTENTS)
            if will_be_answered:
                self._answerable = len(self._sending)

    def send_piece(self, number: int, piece: Tensor) -> None:
        """Begin to send a piece, to which a message that will be answered comes later."""
        with self._lock, suppress(RuntimeError):
            self._begin(piece, PIECES + number)

    def tell(
        self, text: dict[str, Any], tensors: Mapping[str, Tensor] | None = None, *, will_be_answered: bool = False
    ) -> None:
        """Begin to send a text, with tensors by name if there are some."""
        if tensors is not None:
            text = {**text, TENSORS: {name: describe(tensor) for name, tensor in tensors.items()}}
        content = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)
        beside = [bytes_of(tensor) for tensor in (tensors or {}).values() if tensor.numel()]
        self.send(Text(content.numel()), [content, *beside], will_be_answered=will_be_answered)

    def settle(self) -> None:
        """Let go of everything up to the message whose answer has come.

        A send that the other side has received is done; one that the end of the line has overtaken may be waited
        for in vain, with gloo.
        """
        with self._lock:
            done, self._sending = self._sending[: self._answerable], self._sending[self._answerable :]
            self._answerable = 0
        for work, _ in done:
            with saying_when_broken():
                work.wait(FOREVER)

    def receive(self) -> Message | dict[str, Any]:
        """Wait for a message, or a text.

        Raises:
            Broken: there will be none, or what came is none.
        """
        with saying_when_broken():
            with self._posting:
                if not self._headers:
                    self._expect_header()
                arriving, numbers = self._headers.popleft()
            arriving.wait(FOREVER)
        try:
            message = decode(numbers)
            return self._text(message) if isinstance(message, Text) else message
        except ValueError as error:
            raise ConnectionLost(f"what came is no message: {error}") from error

    def receive_into(self, contents: Tensor) -> None:
        """Wait for what follows a message."""
        with saying_when_broken():
            arriving = self._group.recv([contents], self._other, CONTENTS)
            self._group.recv([_nothing()], self._other, END_OF_CONTENTS).wait(FOREVER)
            arriving.wait(FOREVER)

    def make_rooms(self, rooms: Sequence[Tensor]) -> None:
        """Let numbered pieces come into this memory whenever the other side sends them: they wait for no answer then.

        It sends them only when their rooms are free, which it knows from what was said before.
        """
        with saying_when_broken(), self._posting:
            self._rooms = list(rooms)
            self._arriving = [None] * len(rooms)
            self._expect_pieces()

    def receive_pieces(self, numbers: Iterable[int]) -> None:
        """Wait until the pieces of a message are in their rooms, which may be written again once something is sent."""
        with saying_when_broken():
            with self._posting:
                if self._end_of_pieces is None:
                    self._expect_pieces()
                end, self._end_of_pieces = self._end_of_pieces, None
            end.wait(FOREVER)
        self.receive_early_pieces(numbers)

    def receive_early_pieces(self, numbers: Iterable[int]) -> None:
        """Wait likewise for pieces that have come before a message; there may be others."""
        for number in numbers:
            if number >= len(self._rooms):
                raise ConnectionLost(f"there is no piece {number}")
            with saying_when_broken():
                with self._posting:
                    arriving, self._arriving[number] = self._arriving[number] or self._expect(number), None
                arriving.wait(FOREVER)

    def close(self) -> None:
        """End the line at once, whoever waits on it, on both sides."""
        end_pair(self._group, self._other)

    def _text(self, message: Text) -> dict[str, Any]:
        if not 0 < message.nbytes <= self._longest_text:
            raise ValueError(f"a text of {message.nbytes} bytes")
        content = torch.zeros(message.nbytes, dtype=torch.uint8)
        self.receive_into(content)
        text = json.loads(content.numpy().tobytes())
        if not isinstance(text, dict):
            raise ValueError("a text that is no object")
        if self._longest_text > SHORT_BYTES and TENSORS in text:
            text[TENSORS] = {name: self._tensor(*described) for name, described in text[TENSORS].items()}
        return text

    def _tensor(self, dtype: str, shape: list[int]) -> Tensor:
        tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            self.receive_into(bytes_of(tensor))
        return tensor

    def _get_ready(self) -> None:
        """Expect what the other side will say when it has heard what is sent now."""
        with self._posting:
            while len(self._headers) < AHEAD:
                self._expect_header()
            self._expect_pieces()

    def _expect_header(self) -> None:
        numbers = header()
        self._headers.append((self._group.recv([numbers], self._other, HEADERS), numbers))

    def _expect_pieces(self) -> None:
        """Expect every piece, and behind them their end."""
        self._arriving = [each or self._expect(number) for number, each in enumerate(self._arriving)]
        if self._rooms and self._end_of_pieces is None:
            self._end_of_pieces = self._group.recv([_nothing()], self._other, END_OF_PIECES)

    def _expect(self, number: int) -> Any:
        return self._group.recv([self._rooms[number]], self._other, PIECES + number)

    def _begin(self, contents: Tensor, tag: int) -> None:
        self._sending.append((self._group.send([contents], self._other, tag), contents))


def describe(tensor: Tensor) -> tuple[str, list[int]]:
    """Return type and shape of a tensor, as JSON holds them."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as its bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def summarize_value(reason: str) -> str:
    """Return what gloo says without where in its source it says so, and what else may help."""
    said = reason.rpartition("] ")[2] if reason.startswith("[/") else reason
    return said.partition(". This is")[0].partition("\n")[0]
