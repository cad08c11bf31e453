"""Queue from threads to the engine that a selector can wait for."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class EventQueue(Generic[T]):
    """Queue with a file descriptor that is readable while the queue holds an event.

    The pipe holds one byte then, however many events there are, so that `put` never blocks.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        """Return the file descriptor to wait for."""
        return self._reader

    def put(self, item: T) -> None:
        """Add an event; thread-safe."""
        with self._changed:
            self._items.append(item)
            if len(self._items) == 1:
                os.write(self._writer, b"x")
            self._changed.notify()

    def get(self) -> T:
        """Remove and return the oldest event; wait for one if the queue is empty."""
        return self.get_first(lambda item: True)

    def get_first(self, is_wanted: Callable[[T], bool]) -> T:
        """Remove and return the first event that is wanted, or wait for it; all others stay in their order."""
        unwanted = 0  # events at the front that are not wanted
        with self._changed:
            while unwanted == len(self._items) or not is_wanted(self._items[unwanted]):
                if unwanted == len(self._items):
                    self._changed.wait()
                else:
                    unwanted += 1
            item = self._items[unwanted]
            del self._items[unwanted]
            if not self._items:
                os.read(self._reader, 1)
        return item

    def drain(self) -> list[T]:
        """Remove and return all events."""
        items = []
        while not self.is_empty:
            items.append(self.get())
        return items

    @property
    def is_empty(self) -> bool:
        """Whether the queue holds no event."""
        return not self._items

    def close(self) -> None:
        """Close the descriptors; no thread may put anything afterwards."""
        os.close(self._reader)
        os.close(self._writer)
