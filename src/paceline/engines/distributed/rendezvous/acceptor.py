"""Lets processes in, and hears them from then on: a thread for each, which ends with its line."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from paceline.engines.distributed.rendezvous.handshake import JoinRejected, examine, notice_of_end
from paceline.engines.distributed.rendezvous.rendezvous import LOOK_AGAIN_S, Rendezvous
from paceline.engines.distributed.transport.buckets import from_number
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.event_queue import EventSink
from paceline.engines.distributed.transport.messages import (
    GradientStarted,
    Heartbeat,
    Message,
    RemoteTaskCancelled,
    RemoteTaskDone,
    Updated,
)
from paceline.engines.distributed.transport.wire_format import WireBuffer
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)

GRACE_S = 5.0  # for others to come to their end


class PeerJoined(NamedTuple):
    """A process may take part.

    Attributes:
        ticket: by which it is known.
        worker: its number.
        line: to it.
        ticket_at_rank_0: by which it is known there.
    """

    ticket: int
    worker: int
    line: Connection
    ticket_at_rank_0: int


class PeerMessage(NamedTuple):
    """Somebody has said something.

    Attributes:
        at_s: on this host's monotonic clock, when the message came, or would have come if no piece had come before it.
        contents_s: seconds until everything that belongs to it was there.
    """

    ticket: int
    message: Message | dict[str, Any]
    at_s: float
    contents_s: float


class PeerLost(NamedTuple):
    """A line is at its end."""

    ticket: int
    reason: str


class PeerRejected(NamedTuple):
    """A process of this job may not take part."""

    reason: str


class AllWorkersLost(NamedTuple):
    """Some time ago the last worker was gone.

    Attributes:
        joined: how many workers had come until then.
    """

    joined: int


News = PeerJoined | PeerMessage | PeerLost | PeerRejected | AllWorkersLost


class Acceptor:
    """Waits for newcomers, examines them, and receives what those who may take part say.

    Args:
        meeting: where they come.
        token: of the job.
        agreement: what all processes have to agree on.
        rooms: by number of the process, where a worker's gradients come in; None for others.
        inbox: where everything is told.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        token: str,
        agreement: dict[str, Any],
        rooms: Sequence[WireBuffer | None],
        inbox: EventSink[News],
    ) -> None:
        self._meeting = meeting
        self._token = token
        self._agreement = agreement
        self._rooms = rooms
        self._inbox = inbox
        self._closing = threading.Event()
        self._entrance = threading.Lock()
        self._entering: set[int] = set()  # processes that were neither admitted nor refused yet
        self._end: dict[str, Any] | None = None  # of the run, for processes that come later
        self._spoken: set[int] = set()
        self._lines: dict[int, Connection] = {}  # of those who are there, as their threads
        self._threads: dict[int, threading.Thread] = {0: threading.Thread(target=self._watch, daemon=True)}
        self._threads[0].start()

    def has_spoken(self, ticket: int) -> bool:
        """Return whether something has come over a line since this was asked last."""
        has_spoken = ticket in self._spoken
        self._spoken.discard(ticket)
        return has_spoken

    def hang_up(self, ticket: int) -> None:
        """End a line; the thread that listens to it ends then."""
        line = self._lines.get(ticket)
        if line is not None:
            line.close()

    def shut(self, ticket: int) -> None:
        """End a line and the thread that listens to it."""
        self.hang_up(ticket)
        self._join(ticket, GRACE_S)

    def announce_end(self, end: dict[str, Any]) -> None:
        """Send newcomers the end of the run from now on, instead of admitting them."""
        with self._entrance:
            self._end = end
        with suppress(RuntimeError):  # the store may be gone
            self._meeting.announce_end(notice_of_end(end, self._token))

    def close(self) -> bool:
        """Let nobody in any more and end what is left; whether no thread is left that might speak."""
        self._closing.set()
        self._threads[0].join(GRACE_S)
        if self._end is not None:
            self.wait(list(self._entering), GRACE_S)
        for ticket in list(self._lines):
            self.shut(ticket)
        self.wait(list(self._threads), GRACE_S)
        return not any(thread.is_alive() for thread in list(self._threads.values()))

    def wait(self, tickets: list[int], timeout_s: float) -> None:
        """Wait until these have ended their lines themselves, for some time."""
        deadline_s = time.monotonic() + timeout_s
        for ticket in tickets:
            self._join(ticket, max(0.0, deadline_s - time.monotonic()))

    def _join(self, ticket: int, timeout_s: float) -> None:
        thread = self._threads.get(ticket)
        if thread is not None:
            thread.join(timeout_s)

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_AGAIN_S):
            self._look()
        self._look()

    def _look(self) -> None:
        for ticket in self._meeting.newcomers():
            self._entering.add(ticket)
            thread = threading.Thread(target=self._serve, args=(ticket,), daemon=True)
            self._threads[ticket] = thread
            thread.start()

    def _serve(self, ticket: int) -> None:
        """Let a process in and hear it until it has gone; nothing is kept of it then."""
        try:
            with suppress(ConnectionLost):  # it has not stayed
                line = self._lines[ticket] = self._meeting.line(ticket)
                self._receive(ticket, line)
        finally:
            self._entering.discard(ticket)
            self._lines.pop(ticket, None)
            del self._threads[ticket]

    def _receive(self, ticket: int, line: Connection) -> None:
        try:
            hello = examine(line, self._token, self._agreement, len(self._rooms))
            worker, ticket_at_rank_0 = int(hello["worker"]), int(hello.get("ticket", ticket))
        except JoinRejected as refused:
            self._turn_away(line, refused)
        except (ConnectionLost, KeyError, TypeError, ValueError):
            line.close()
        else:
            self._listen(PeerJoined(ticket, worker, line, ticket_at_rank_0))

    def _turn_away(self, line: Connection, refused: JoinRejected) -> None:
        """Tell of somebody who may not take part, once it has heard so and has gone."""
        with suppress(ConnectionLost):
            line.receive()
        if refused.is_ours:
            self._inbox.put(PeerRejected(str(refused)))
        else:
            LOG.warning("rejected a connection: %s", refused)

    def _welcome(self, entered: PeerJoined) -> bool:
        """Admit a process, or send it the end of the run; return whether it takes part."""
        with self._entrance:
            end = self._end
            if end is None:
                entered.line.tell({"welcome": True})
                self._report(entered)
                self._entering.discard(entered.ticket)
                return True
        entered.line.tell({"end": end})
        with suppress(ConnectionLost):
            entered.line.receive()  # until it has gone
        return False

    def _report(self, entered: PeerJoined) -> None:
        self._inbox.put(entered)

    def _listen(self, entered: PeerJoined) -> None:
        ticket, line = entered.ticket, entered.line
        try:
            room = self._rooms[entered.worker]
            if room is not None:
                line.make_rooms(room.pieces)
            if not self._welcome(entered):
                return
            given_s = None  # when the worker had its work, if it has told before its gradient was there
            while True:
                message = line.receive()
                at_s = time.monotonic()
                self._spoken.add(ticket)
                if isinstance(message, Heartbeat):
                    continue
                if isinstance(message, GradientStarted):
                    given_s = at_s - message.busy_s
                    continue
                if isinstance(message, RemoteTaskDone) and given_s is not None:
                    at_s = given_s + message.busy_s  # when it was there: its header has waited behind pieces
                if isinstance(message, RemoteTaskDone | RemoteTaskCancelled | Updated) or "metrics" in message:
                    if room is not None:
                        _receive_pieces(line, room, message)
                    line.settle()
                    given_s = None
                self._inbox.put(PeerMessage(ticket, message, at_s, time.monotonic() - at_s))
        except ConnectionLost as error:
            self._inbox.put(PeerLost(ticket, str(error)))


def _receive_pieces(line: Connection, room: WireBuffer, message: object) -> None:
    """Wait for what has come, or still comes, of the gradient that a message is about."""
    match message:
        case RemoteTaskDone():
            line.receive_pieces(range(len(room.pieces)))
            for number in range(len(room.pieces)):
                room.unpack(number)
            for number in from_number(message.again):
                line.receive_into(room.pieces[number])
                room.unpack(number)
        case RemoteTaskCancelled():
            line.receive_early_pieces(from_number(message.gone))


class AcceptedPeer(NamedTuple):
    """A process that takes part, or is about to."""

    ticket: int
    line: Connection
    name: str
    has_own_gpu: bool


class Host(Protocol):
    """Who is told of them, in a thread for each."""

    def enter(self, worker: int, member: AcceptedPeer) -> None:
        """Let a process take part."""

    def hear(self, worker: int, ticket: int, text: dict[str, Any]) -> None:
        """Take in what a worker says."""

    def leave(self, worker: int, ticket: int, reason: str) -> None:
        """Note that a process is gone."""

    def fail(self, error: Exception) -> None:
        """Let the run end with this."""


class Gate(Acceptor):
    """A door behind which everybody is listened to by the same host.

    Args:
        host: is told.
        place: of the door, as in `Acceptor`.
    """

    def __init__(self, host: Host, *place: Any) -> None:
        self._host = host
        super().__init__(*place)

    def _report(self, entered: PeerJoined) -> None:
        """Report nothing yet: the host gets the report when the process has sent its name."""

    def _listen(self, entered: PeerJoined) -> None:
        ticket, worker, line, _ = entered
        try:
            if not self._welcome(entered):
                return
            hello = line.receive()
            assert isinstance(hello, dict)
            self._host.enter(worker, AcceptedPeer(ticket, line, str(hello["name"]), bool(hello["has_own_gpu"])))
            while True:
                text = line.receive()
                assert isinstance(text, dict)
                self._host.hear(worker, ticket, text)
        except ConnectionLost as error:
            self._host.leave(worker, ticket, str(error))
        except Exception as error:  # nobody would hear this worker any more, and the run wait for it for ever
            self._host.fail(error)
