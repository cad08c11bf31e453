"""Selector thread that reads and writes sockets of a process."""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
ALIVE_CHECK_S = 0.5  # between two looks at whether the thread has ended


class HasFileno(Protocol):
    """Object for which a selector can wait."""

    def fileno(self) -> int:
        """Return the file descriptor."""


class SocketLoop:
    """Thread that waits for some sockets of a process and calls their handlers.

    Handlers run in this thread only. After each wait the ready sockets are read first, and then the timers run: a pause
    of this process never counts as silence of another one.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._on_wake)
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()  # order of timers of one moment
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-sockets", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread, soon; any thread may use this. After `close` it is not called."""
        self._calls.append(function)
        if threading.current_thread() is not self._thread:
            with suppress(OSError):  # the thread is awake, or has ended
                self._wake_writer.send(b"x")

    def run(self, function: Callable[[], None]) -> None:
        """Call a function in the thread: now if this is the thread, else soon."""
        if threading.current_thread() is self._thread:
            function()
        else:
            self.call(function)

    def call_and_wait(self, function: Callable[[], None]) -> None:
        """Call a function in the thread, and return when it has returned, or when the thread has ended."""
        if threading.current_thread() is self._thread:
            function()
            return
        has_returned = threading.Event()
        self.call(function)
        self.call(has_returned.set)
        while self._thread.is_alive() and not has_returned.wait(ALIVE_CHECK_S):
            pass

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Call a function in the thread after a delay; in the thread only."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), function))

    def watch(self, sock: HasFileno, events: int, on_ready: Callable[[], None]) -> None:
        """Call a handler whenever a socket is ready for these events, 0 for none; in the thread only."""
        known = self._selector.get_map().get(sock)
        if known is None:
            if events:
                self._selector.register(sock, events, on_ready)
        elif not events:
            self._selector.unregister(sock)
        elif (known.events, known.data) != (events, on_ready):
            self._selector.modify(sock, events, on_ready)

    def close(self) -> None:
        """Stop the thread, after all functions that were to be called; its sockets are closed by their owners."""
        self.call(self._stop)
        self._thread.join()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _stop(self) -> None:
        self._is_closed = True

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(self._timeout_s()):
                self._try(key.data)
            for _ in range(len(self._calls)):  # those that these calls add wait until the sockets were read
                self._try(self._calls.popleft())
            now_s = time.monotonic()
            while self._timers and self._timers[0][0] <= now_s:
                self._try(heapq.heappop(self._timers)[2])

    def _timeout_s(self) -> float | None:
        if self._calls:
            return 0.0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _try(self, function: Callable[[], None]) -> None:
        """Call a handler; an error of one must not end the connections of all others."""
        try:
            function()
        except Exception:
            LOG.exception("error in the thread of the sockets")

    def _on_wake(self) -> None:
        with suppress(BlockingIOError):
            self._wake_reader.recv(1 << 12)
