"""Heartbeat monitor: detects shard servers that hang, whose connections stay open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from paceline.engines.distributed.rendezvous.acceptor import Acceptor, PeerEvent, PeerLost
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.task_messages import Heartbeat

CHECKS = 10  # per timeout; a pause of this process counts as one check, and never as the silence of others


class HeartbeatMonitor:
    """Heartbeat monitor for shard servers, in a thread, because the main thread may wait for a server.

    A server that sends nothing within the timeout is reported as lost and disconnected.

    Args:
        connections: connections to the servers, by peer id.
        acceptor: acceptor of these connections.
        events: queue for the report.
        timeout_s: returns the longest silence in seconds; it may change during the run.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        acceptor: Acceptor,
        events: EventQueue[PeerEvent],
        timeout_s: Callable[[], float],
    ) -> None:
        self._connections = connections
        self._acceptor = acceptor
        self._events = events
        self._timeout_s = timeout_s
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if connections:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        missed = dict.fromkeys(self._connections, 0)  # checks in a row without a message
        while not self._stopping.wait((timeout_s := self._timeout_s()) / CHECKS):
            for peer_id, connection in self._connections.items():
                missed[peer_id] = 0 if self._acceptor.was_active(peer_id) else missed[peer_id] + 1
                if missed[peer_id] > CHECKS:
                    self._events.put(PeerLost(peer_id, f"silent for {timeout_s:.3g} s"))
                    self._acceptor.disconnect(peer_id)
                    return
                connection.send(Heartbeat())
