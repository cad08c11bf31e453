"""A line between two processes: a process group of two, on gloo, so that its end concerns nobody else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from paceline.engines.distributed.messages import Evaluation, Finished, Message, Text, Work, decode, encode, header

dist: Any = distributed  # it does not export the types of all its names

CONNECT_TIMEOUT = timedelta(seconds=20)
FOREVER = timedelta(days=365)  # gloo closes a pair on which a receive has taken too long
AT_ONCE = timedelta(milliseconds=1)
HEADERS, CONTENTS, NOTHING, VECTORS = 1, 2, 3, 4  # tags
SHORT_BYTES = 1 << 20  # what may be said before anybody knows who says it
WITH_VECTORS = (Work, Evaluation, Finished)  # what follows these has its room ready


class Broken(Exception):  # noqa: N818  # a line ends with every run
    """A line is at its end, or what came over it is no message."""


@contextmanager
def saying_when_broken() -> Iterator[None]:
    """Raise Broken where gloo raises whatever it does."""
    try:
        yield
    except RuntimeError as error:  # of whatever kind torch raises
        raise Broken(in_short(str(error))) from error


class Line:
    """Sends to and receives from one other process.

    Any thread may send; one thread receives. What is sent stays as it is until the other side has answered.

    Args:
        store: where the two find each other, a client of its own.
        key: that only these two use.
        side: 0 for the server, 1 for the worker.
        device: of gloo, from `listening`.

    Raises:
        Broken: the other one did not come.
    """

    def __init__(self, store: Any, key: str, side: int, device: Any) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = CONNECT_TIMEOUT
        options._devices = [device]
        options._threads = 1
        with saying_when_broken():
            self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(key, store), side, 2, options)
        self._other = 1 - side
        self._sending: list[tuple[Any, Tensor]] = []  # gloo neither waits for itself nor keeps the memory
        self._answerable = 0  # of them, up to the last one that will be answered
        self._lock = threading.Lock()
        self._room: Tensor | None = None
        self._arriving: Any = None
        self.longest_text = SHORT_BYTES

    def send(self, message: Message, contents: Tensor | None = None, *, will_be_answered: bool = False) -> None:
        """Begin to send a message and what follows it; that the line is broken, the next receive tells.

        Args:
            message: to send.
            contents: that follow it.
            will_be_answered: whether there will be an answer, from which it is known that both have come.
        """
        with self._lock, suppress(RuntimeError):
            self._begin(encode(message), HEADERS)
            if contents is not None:
                self._begin(contents, VECTORS if isinstance(message, WITH_VECTORS) else CONTENTS)
            if will_be_answered:
                self._answerable = len(self._sending)

    def tell(self, text: dict[str, Any], *, will_be_answered: bool = False) -> None:
        """Begin to send a text."""
        content = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)
        self.send(Text(content.numel()), content, will_be_answered=will_be_answered)

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
        numbers = header()
        self._receive_into(numbers, HEADERS)
        try:
            message = decode(numbers)
            return self._text(message) if isinstance(message, Text) else message
        except ValueError as error:
            raise Broken(f"what came is no message: {error}") from error

    def receive_into(self, contents: Tensor) -> None:
        """Wait for what follows a message."""
        self._receive_into(contents, CONTENTS)

    def make_room(self, room: Tensor) -> None:
        """Let vectors come into this memory whenever the other side sends them: they wait for no answer then.

        It sends them only when the room is free, which it knows from what was said before.
        """
        with saying_when_broken():
            self._room = room
            self._arriving = self._group.recv([room], self._other, VECTORS)

    def receive_vectors(self) -> None:
        """Wait until the vectors that follow a message are in their room."""
        with saying_when_broken():
            self._arriving.wait(FOREVER)
            self._arriving = self._group.recv([self._room], self._other, VECTORS)

    def close(self) -> None:
        """End the line at once, whoever waits on it, on both sides."""
        with suppress(RuntimeError):  # gloo ends a pair on which a wait has timed out, and in no other way
            self._group.recv([torch.zeros(1)], self._other, NOTHING).wait(AT_ONCE)

    def _text(self, message: Text) -> dict[str, Any]:
        if not 0 < message.nbytes <= self.longest_text:
            raise ValueError(f"a text of {message.nbytes} bytes")
        content = torch.zeros(message.nbytes, dtype=torch.uint8)
        self.receive_into(content)
        text = json.loads(content.numpy().tobytes())
        if not isinstance(text, dict):
            raise ValueError("a text that is no object")
        return text

    def _receive_into(self, contents: Tensor, tag: int) -> None:
        with saying_when_broken():
            self._group.recv([contents], self._other, tag).wait(FOREVER)

    def _begin(self, contents: Tensor, tag: int) -> None:
        self._sending.append((self._group.send([contents], self._other, tag), contents))


def in_short(reason: str) -> str:
    """Return what gloo says without where in its source it says so, and what else may help."""
    said = reason.rpartition("] ")[2] if reason.startswith("[/") else reason
    return said.partition(". This is")[0].partition("\n")[0]
