"""What threads have to say to the engine, in a queue that a selector can wait for."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
Told = TypeVar("Told", contravariant=True)


class EventSink(Protocol[Told]):
    """Where something can be told, from any thread."""

    def put(self, item: Told, /) -> None:
        """Add something."""


class EventQueue(Generic[T]):
    """A queue with a file descriptor that is readable while something is in it."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        """Return what to wait for."""
        return self._reader

    def put(self, item: T) -> None:
        """Add something, from any thread."""
        self._waiting.append(item)
        os.write(self._writer, b"x")

    def get(self) -> T:
        """Take what has waited longest, or wait for something."""
        os.read(self._reader, 1)
        return self._waiting.popleft()

    def take(self, is_wanted: Callable[[T], bool]) -> T:
        """Take the first one that is wanted, or wait for it; all others stay as they are."""
        passed: list[T] = []
        while not is_wanted(item := self.get()):
            passed.append(item)
        self._waiting.extendleft(reversed(passed))
        os.write(self._writer, b"x" * len(passed))
        return item

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def close(self) -> None:
        """Let go of the descriptors, when no thread is left that puts anything."""
        os.close(self._reader)
        os.close(self._writer)
