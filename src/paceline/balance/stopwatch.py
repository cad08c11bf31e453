"""Stopwatch of a rank: seconds of its own loading and computing, without waiting for other ranks."""

from __future__ import annotations

from typing import Any

import torch


class HostClock:
    """Clock of a device for which the host waits."""

    def __init__(self) -> None:
        from time import perf_counter

        self.now = perf_counter

    @staticmethod
    def seconds(begin: float, end: float) -> float:
        """Return the seconds between two times."""
        return end - begin


class CudaClock:
    """Clock of the current CUDA stream, which the host does not wait for until the seconds are read."""

    @staticmethod
    def now() -> Any:
        """Return an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def seconds(begin: Any, end: Any) -> float:
        """Return the seconds between two events, and wait for the second one."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class Stopwatch:
    """Stopwatch that runs while the rank computes, from its batch to the end of its own graph.

    Args:
        clock: clock of the device.
    """

    def __init__(self, clock: HostClock | CudaClock) -> None:
        self._clock = clock
        self._spans: list[tuple[Any, Any]] = []
        self._begin: Any = None

    def start(self) -> None:
        """Start, or go on after a stop."""
        if self._begin is None:
            self._begin = self._clock.now()

    def restart(self) -> None:
        """Start, and leave out what has run since the last start without a stop."""
        self._begin = self._clock.now()

    def stop(self) -> None:
        """Stop, if it runs."""
        if self._begin is not None:
            self._spans.append((self._begin, self._clock.now()))
            self._begin = None

    def take(self) -> float:
        """Return the seconds since the last call, and begin anew."""
        self._begin = None
        spans, self._spans = self._spans, []
        return sum(self._clock.seconds(begin, end) for begin, end in spans)
