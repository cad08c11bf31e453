"""Real-time engine: clock, timers, event queue and signals of engines whose workers are processes."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from heapq import heappop, heappush
from types import TracebackType
from typing import Self

import torch

from paceline.core.events import Event, SetTimer, Timer
from paceline.engines.base import Engine


class WallClockEngine(Engine):
    """Base of engines that run in real time."""

    def __init__(self) -> None:
        super().__init__()
        self._events: deque[Event] = deque()
        self._timers: list[float] = []
        self._begun_s = 0.0
        self._threads = torch.get_num_threads()

    def __enter__(self) -> Self:
        """Handle signals, start the workers and start the clock."""
        super().__enter__()
        try:
            self._start()
        except BaseException as error:
            # Not that of a subclass, whose parts may be missing.
            WallClockEngine.__exit__(self, type(error), error, error.__traceback__)
            raise
        self._begun_s = time.monotonic() - self.now
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End the workers and release all resources."""
        torch.set_num_threads(self._threads)
        super().__exit__(kind, error, where)

    @abstractmethod
    def _start(self) -> None:
        """Start what the run needs and wait until it is ready, or until a signal is caught."""

    @abstractmethod
    def _advance(self) -> None:
        """Wait until something happens, and add its events to the queue."""

    def resume_at(self, version: int, now: float) -> None:
        """Start the clock at this time."""
        self.now = now

    def set_timer(self, command: SetTimer) -> None:
        """Set a timer."""
        heappush(self._timers, command.at_s)

    def next_event(self) -> Event:
        """Return the next event; wait for one if the queue is empty."""
        while not self._events:
            self._advance()
        return self._events.popleft()

    def _add_timers(self, until_s: float, now: float) -> None:
        """Add the timers up to a time to the event queue, as events of this moment."""
        while self._timers and self._timers[0] <= until_s:
            heappop(self._timers)
            self._events.append(Timer(now))

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s
