"""Connection acceptor: admits the processes that connect to a server, and passes on their messages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from paceline.engines.distributed.rendezvous.handshake import warn_of_others, why_rejected
from paceline.engines.distributed.transport import messages, standby_messages
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.transport import Transport
from paceline.recording.metrics.network_counters import RejectionCause

GRACE_S = 5.0  # for other processes to end


class AcceptedPeer(NamedTuple):
    """Process that takes part.

    Attributes:
        peer_id: id of the process at this server.
        worker: number of the process, as in `Hello`.
        connection: connection to it.
        name: name in messages.
        gpu: identifier of its GPU, as in `Hello`.
        shard: number of its shard, as in `Hello`.
        others: ids of the ranks that have the other shards of its replica.
        rank_0_id: id of the process at rank 0.
        process: text that no other process has, as in `Hello`.
        version: newest version that it has, as in `Hello`.
    """

    peer_id: int
    worker: int
    connection: Connection
    name: str = ""
    gpu: str = ""
    shard: int = 0
    others: tuple[int, ...] = ()
    rank_0_id: int = 0
    process: str = ""
    version: int = -1


class PeerHandler(Protocol):
    """Receiver of an acceptor's callbacks, which come from the thread of the sockets."""

    def on_join(self, peer: AcceptedPeer) -> None:
        """Handle a new peer."""

    def on_message(self, peer: AcceptedPeer, message: Message, at_s: float, contents_s: float) -> None:
        """Handle a message.

        Args:
            peer: sender.
            message: message; all that was sent before it has been received.
            at_s: arrival on this host's monotonic clock.
            contents_s: seconds from then until all tensors of the message had arrived.
        """

    def on_leave(self, peer: AcceptedPeer, reason: str) -> None:
        """Handle the end of a connection."""

    def on_reject(self, reason: str) -> None:
        """Handle a process of this job that may not take part."""

    def fail(self, error: Exception) -> None:
        """Handle an error in another callback."""


class PeerJoined(NamedTuple):
    """A process takes part."""

    peer: AcceptedPeer


class PeerMessage(NamedTuple):
    """Message of a peer; see `PeerHandler.on_message`."""

    peer_id: int
    message: Message
    at_s: float
    contents_s: float


class PeerLost(NamedTuple):
    """The connection to a peer has ended."""

    peer_id: int
    reason: str


class PeerRejected(NamedTuple):
    """A process of this job may not take part."""

    reason: str


class AllWorkersLost(NamedTuple):
    """The last worker was lost some time ago.

    Attributes:
        joined: number of workers that had joined until then.
    """

    joined: int


class SidecarDue(NamedTuple):
    """The worker beside rank 0 is to be started again."""


PeerEvent = PeerJoined | PeerMessage | PeerLost | PeerRejected | AllWorkersLost | SidecarDue | Exception


class QueueHandler:
    """Handler that puts an event into a queue for each callback.

    Args:
        events: queue.
    """

    def __init__(self, events: EventQueue[PeerEvent]) -> None:
        self._events = events

    def on_join(self, peer: AcceptedPeer) -> None:
        """Queue `PeerJoined`."""
        self._events.put(PeerJoined(peer))

    def on_message(self, peer: AcceptedPeer, message: Message, at_s: float, contents_s: float) -> None:
        """Queue `PeerMessage`."""
        self._events.put(PeerMessage(peer_id=peer.peer_id, message=message, at_s=at_s, contents_s=contents_s))

    def on_leave(self, peer: AcceptedPeer, reason: str) -> None:
        """Queue `PeerLost`."""
        self._events.put(PeerLost(peer.peer_id, reason))

    def on_reject(self, reason: str) -> None:
        """Queue `PeerRejected`."""
        self._events.put(PeerRejected(reason))

    def fail(self, error: Exception) -> None:
        """Queue the error."""
        self._events.put(error)


class Acceptor:
    """Server side of all connections: admits processes and calls a handler with their messages.

    All callbacks come from the thread of the sockets and must not block.

    Args:
        transport: transport of this process.
        host: address to listen on.
        port: port to listen on; 0 for a free one.
        job_spec: settings that must be equal on all processes.
        processes: number of processes that may take part, each with a number below it.
        handler: receiver of the callbacks.
        on_accept: called with each peer, which does not know yet that it takes part.

    Attributes:
        address: host and port on which this server listens.
        is_open: whether processes are admitted; else they are to try again.

    Raises:
        UsageError: the address is not this host's, or its port is in use.
    """

    def __init__(
        self,
        transport: Transport,
        host: str,
        port: int,
        job_spec: dict[str, Any],
        processes: int,
        handler: PeerHandler,
        on_accept: Callable[[AcceptedPeer], None] = lambda peer: None,
    ) -> None:
        self._job_spec = job_spec
        self._processes = processes
        self._handler = handler
        self._on_accept = on_accept
        self._counters = transport.counters
        self._leaders: dict[int, int] = {}  # ports, by worker
        self._changed = threading.Condition()
        self._connections: dict[int, _ServedConnection] = {}  # that are open, by peer id
        self._peer_ids = itertools.count(1)
        self._end: messages.End | None = None  # for processes that come after the run
        self.is_open = True
        self._listener = transport.listen(host, port, self._on_connection, handler.on_reject)
        self.address = self._listener.address

    def disconnect(self, peer_id: int, timeout_s: float = 0.0) -> None:
        """Close the connection to a process.

        Args:
            peer_id: id of the process.
            timeout_s: seconds to wait until its last callback has returned; 0 in a callback.
        """
        with self._changed:
            served = self._connections.get(peer_id)
        if served is not None:
            served.connection.close()
            if timeout_s:
                self.join([peer_id], timeout_s)

    def join(self, peer_ids: Iterable[int], timeout_s: float) -> bool:
        """Wait until these processes have closed their connections; return whether they have before the timeout."""
        waited_for = set(peer_ids)
        with self._changed:
            return self._changed.wait_for(lambda: not waited_for & self._connections.keys(), timeout_s)

    def announce_end(self, end: messages.End) -> None:
        """Send the end of the run to new processes from now on, instead of admitting them."""
        with self._changed:
            self._end = end

    def close(self) -> bool:
        """Stop to listen and close all connections; return whether all callbacks have returned."""
        self._listener.close()
        with self._changed:
            # These processes still have to receive the end of the run.
            late = [peer_id for peer_id, served in self._connections.items() if served.is_undecided]
            is_announced = self._end is not None
        if is_announced:
            self.join(late, GRACE_S)
        with self._changed:
            peer_ids = list(self._connections)
        for peer_id in peer_ids:
            self.disconnect(peer_id)
        return self.join(peer_ids, GRACE_S)

    # --- callbacks, in the thread of the sockets ----------------------------------------------------------

    def _on_connection(self, connection: Connection) -> None:
        connection.accepts_state = False  # a process that joins may not choose how much memory is allocated
        served = _ServedConnection(self, connection, next(self._peer_ids), self._handler)
        with self._changed:
            self._connections[served.peer_id] = served
        connection.listen(served.on_message, served.on_end)

    def admit(self, peer_id: int, hello: messages.Hello, connection: Connection) -> AcceptedPeer | None:
        """Admit a process, send it the end of the run, or reject it; return it if it takes part."""
        if not self.is_open:
            connection.send(standby_messages.NotServing())
            return None
        if reason := why_rejected(hello, self._job_spec, self._processes):
            connection.send(messages.Rejected(reason))
            self._counters.on_rejected(RejectionCause.OTHER_JOB)
            self._handler.on_reject(reason)
            return None
        warn_of_others(hello, self._job_spec)
        with self._changed:  # so that a process is either in the handler's queue or receives the end here
            if self._end is not None:
                connection.send(self._end)
                return None
            rank_0_id = hello.peer_id or peer_id
            peer = AcceptedPeer(
                peer_id=peer_id,
                worker=hello.worker,
                connection=connection,
                name=hello.name,
                gpu=hello.gpu,
                shard=hello.shard,
                rank_0_id=rank_0_id,
                process=hello.process,
                version=hello.version,
            )
            self._on_accept(peer)
            connection.send(messages.Accepted(peer_id))
            self._handler.on_join(peer)
            return peer

    def answer_about_leader(self, message: Message, connection: Connection) -> bool:
        """Record or return the port of a node's leader; return whether the message was about one."""
        match message:
            case messages.LeaderListens(worker, port):
                if worker < self._processes:
                    self._leaders[worker] = port
            case messages.FindLeader(worker):
                connection.send(self._end or messages.LeaderPort(self._leaders.get(worker)))
            case _:
                return False
        return True

    def remove(self, peer_id: int) -> None:
        """Forget a connection that has ended."""
        with self._changed:
            del self._connections[peer_id]
            self._changed.notify_all()


class _ServedConnection:
    """Connection at the acceptor, from its first message to its end."""

    def __init__(self, acceptor: Acceptor, connection: Connection, peer_id: int, handler: PeerHandler) -> None:
        self.connection = connection
        self.peer_id = peer_id
        self.is_undecided = True  # whether the process may still be admitted, or has received the end of the run
        self._acceptor = acceptor
        self._handler = handler
        self._peer: AcceptedPeer | None = None

    def on_message(self, message: Message, at_s: float, contents_s: float) -> None:
        try:
            if self._peer is not None:
                self._handler.on_message(self._peer, message, at_s, contents_s)
            elif isinstance(message, messages.Hello):
                self._peer = self._acceptor.admit(self.peer_id, message, self.connection)
                self.is_undecided = self._peer is None
            elif self._acceptor.answer_about_leader(message, self.connection):
                self.is_undecided = False
            else:
                self.connection.close()
        except Exception as error:  # the process may wait for an answer, so the run may not wait for it
            self._handler.fail(error)

    def on_end(self, reason: str) -> None:
        try:
            if self._peer is not None:
                self._handler.on_leave(self._peer, reason)
        except Exception as error:
            self._handler.fail(error)
        finally:
            self._acceptor.remove(self.peer_id)
