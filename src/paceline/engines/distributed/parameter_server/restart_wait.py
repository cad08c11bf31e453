"""Wait for the launcher to start a worker again, after the last one is lost."""

from __future__ import annotations

import threading

from paceline.engines.distributed.rendezvous.acceptor import AllWorkersLost, PeerEvent
from paceline.engines.distributed.transport.event_queue import EventQueue


class RestartWait:
    """Wait that begins anew with each loss of the last worker.

    Args:
        events: queue that gets an `AllWorkersLost` at the end of each wait.
        timeout_s: seconds of a wait, > 0.
    """

    def __init__(self, events: EventQueue[PeerEvent], timeout_s: float) -> None:
        self._events = events
        self._timeout_s = timeout_s
        self._timers: list[threading.Timer] = []

    def begin(self, joined: int) -> None:
        """Begin a wait, when this number of workers has joined so far."""
        timer = threading.Timer(self._timeout_s, self._events.put, [AllWorkersLost(joined)])
        self._timers.append(timer)
        timer.start()

    def close(self) -> None:
        """End all waits."""
        for timer in self._timers:
            timer.cancel()
            timer.join()  # it may be using the queue, which is closed next
