"""Stopwatch of a rank: seconds of its own loading and computing, without waiting for other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

Spans = Sequence[tuple[Any, Any]]


class HostClock:
    """Clock of a device for which the host waits."""

    def now(self) -> Any:
        """Return a time."""
        return perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two times."""
        return float(end - begin)


class StreamClock(HostClock):
    """Clock of the current stream of a CUDA device, which the host waits for only where seconds are read.

    Args:
        device: device of the model, which need not be the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """Return an event on the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two events, once the second one has passed."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class Stopwatch:
    """Stopwatch that runs while the rank loads or computes.

    Args:
        clock: clock of the device.
    """

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._spans: list[tuple[Any, Any]] = []
        self._begin: Any = None

    @property
    def is_running(self) -> bool:
        """Whether time passes on it."""
        return self._begin is not None

    def start(self) -> None:
        """Start, if it does not run."""
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

    def take(self) -> Spans:
        """Return what has run since the last call, and stop."""
        spans, self._spans = self._spans, []
        self._begin = None
        return spans

    def seconds(self, spans: Spans) -> float:
        """Return the sum of spans in seconds; a device is waited for until it has passed them."""
        return sum(self._clock.seconds(begin, end) for begin, end in spans)
