"""Queue from threads to the engine that a selector can wait for."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class EventQueue(Generic[T]):
    """Queue with a file descriptor that is readable while the queue holds an event."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        """Return the file descriptor to wait for."""
        return self._reader

    def put(self, item: T) -> None:
        """Add an event; thread-safe."""
        self._items.append(item)
        os.write(self._writer, b"x")

    def get(self) -> T:
        """Remove and return the oldest event; wait for one if the queue is empty."""
        os.read(self._reader, 1)
        return self._items.popleft()

    def get_first(self, is_wanted: Callable[[T], bool]) -> T:
        """Remove and return the first event that is wanted, or wait for it; all others stay in their order."""
        others: list[T] = []
        while not is_wanted(item := self.get()):
            others.append(item)
        self._items.extendleft(reversed(others))
        os.write(self._writer, b"x" * len(others))
        return item

    @property
    def is_empty(self) -> bool:
        """Whether the queue holds no event."""
        return not self._items

    def close(self) -> None:
        """Close the descriptors; no thread may put anything afterwards."""
        os.close(self._reader)
        os.close(self._writer)
