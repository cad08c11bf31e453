"""Notices servers of slices that are there, but do nothing any more: a process that hangs keeps its line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from paceline.engines.distributed.rendezvous.acceptor import Acceptor, News, PeerLost
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.event_queue import EventSink
from paceline.engines.distributed.transport.messages import Heartbeat

LOOKS = 10  # a pause of this process is one of them, and never looks like the silence of others


class HeartbeatMonitor:
    """Asks every server again and again whether it is alive, in a thread, since whoever works may wait for it.

    One from which nothing has come is reported as gone, and its line ends.

    Args:
        lines: to the servers, by ticket.
        door: hears them.
        inbox: where it is told.
        patience_s: how long one may be silent; it may change.
    """

    def __init__(
        self, lines: Mapping[int, Connection], door: Acceptor, inbox: EventSink[News], patience_s: Callable[[], float]
    ) -> None:
        self._lines = lines
        self._door = door
        self._inbox = inbox
        self._patience_s = patience_s
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if lines:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        silent = dict.fromkeys(self._lines, 0)  # looks in a row without a word, by ticket
        while not self._is_over.wait((patience_s := self._patience_s()) / LOOKS):
            for ticket, line in self._lines.items():
                silent[ticket] = 0 if self._door.has_spoken(ticket) else silent[ticket] + 1
                if silent[ticket] > LOOKS:
                    self._inbox.put(PeerLost(ticket, f"silent for {patience_s:.3g} s"))
                    self._door.hang_up(ticket)
                    return
                line.send(Heartbeat())
