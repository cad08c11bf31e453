"""A process that takes part, as rank 0 knows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paceline.engines.distributed.rendezvous.acceptor import PeerMessage
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.messages import RemoteTaskDone
from paceline.engines.wall_clock import Peer

NO_VERSION = -1


class Arriving(NamedTuple):
    """A gradient of which the part of rank 0 has come.

    Attributes:
        finished: what the worker says of it.
        at_s: when it was there at the worker, on this host's monotonic clock.
        contents_s: seconds until that part was here.
    """

    finished: RemoteTaskDone
    at_s: float
    contents_s: float


class RemoteWorker(Peer):
    """A worker, or the process that evaluates.

    A gradient has arrived when its last part has, at whichever server: the one at rank 0 gets its scalars too, and the
    others say what has come to them. So one of which a part is missing, because its worker has died, has not arrived.

    Args:
        ticket: by which it is known.
        worker: its number.
        line: to it.
        slices: the other servers than rank 0's, which have to know it before it can be given work.

    Attributes:
        strangers: those that do not know it yet.
        holds: the version that it was sent last.
        sent_s: when it was given its work.
    """

    def __init__(self, ticket: int, worker: int, line: Connection, slices: Iterable[int]) -> None:
        super().__init__()
        self.ticket = ticket
        self.worker = worker
        self.line = line
        self.strangers = set(slices)
        self.holds = NO_VERSION
        self.sent_s = 0.0
        self._came = dict.fromkeys(self.strangers, 0)  # draw of the newest part, by slice
        self._arriving: Arriving | None = None

    def finished(self, finished: RemoteTaskDone, heard: PeerMessage) -> Arriving | None:
        """Take note that there are the scalars and the part of rank 0; return the gradient if it is whole."""
        self._arriving = Arriving(finished, heard.at_s, heard.contents_s)
        return self._whole()

    def came(self, number: int, draw: int) -> Arriving | None:
        """Take note that a slice has its part; return the gradient if it is whole."""
        self._came[number] = draw
        return self._whole()

    def _whole(self) -> Arriving | None:
        arriving = self._arriving
        if arriving is None or any(draw < arriving.finished.draw for draw in self._came.values()):
            return None
        self._arriving = None
        return arriving
