"""Connection acceptor: authenticates each peer and runs one receive loop per connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from paceline.engines.distributed.rendezvous.handshake import JoinRejected, authenticate_peer, sign_end
from paceline.engines.distributed.rendezvous.rendezvous import Rendezvous
from paceline.engines.distributed.transport import messages, task_messages
from paceline.engines.distributed.transport.buckets import from_bitmask
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost, Message
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.wire_format import WireBuffer
from paceline.errors import RunError
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)

GRACE_S = 5.0  # for other processes to end
ANSWERS = (
    task_messages.RemoteTaskDone
    | task_messages.RemoteTaskCancelled
    | task_messages.UpdateDone
    | messages.EvaluationResult
    | messages.StepReport
)


class AcceptedPeer(NamedTuple):
    """Process that takes part.

    Attributes:
        peer_id: id of the process at this server.
        worker: number of the process, as in `Hello`.
        connection: connection to it.
        name: name in messages.
        has_own_gpu: whether the process has a GPU that no other process uses.
        rank_0_id: id of the process at rank 0.
    """

    peer_id: int
    worker: int
    connection: Connection
    name: str = ""
    has_own_gpu: bool = False
    rank_0_id: int = 0


class PeerHandler(Protocol):
    """Receiver of an acceptor's callbacks, which come from the thread of the peer."""

    def on_join(self, peer: AcceptedPeer) -> None:
        """Handle a new peer."""

    def on_message(self, peer: AcceptedPeer, message: Message, at_s: float, contents_s: float) -> None:
        """Handle a message.

        Args:
            peer: sender.
            message: message without its tensors, which have been received.
            at_s: arrival on this host's monotonic clock; for a gradient whose buckets were sent early, the moment at
                which the worker had completed it.
            contents_s: seconds from then until all tensors of the message had arrived.
        """

    def on_leave(self, peer: AcceptedPeer, reason: str) -> None:
        """Handle the end of a connection."""

    def on_reject(self, reason: str) -> None:
        """Handle a process of this job that may not take part."""

    def fail(self, error: Exception) -> None:
        """Handle an error in a receive loop, which has ended."""


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


PeerEvent = PeerJoined | PeerMessage | PeerLost | PeerRejected | AllWorkersLost | Exception


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
        self._events.put(PeerMessage(peer.peer_id, message, at_s, contents_s))

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
    """Server side of all connections: admits peers and calls a handler with their messages.

    Args:
        rendezvous: source of new peers.
        token: token of the job.
        job_spec: settings that must be equal on all processes.
        buffers: by number of the process, memory for a worker's gradients; None for other processes.
        handler: receiver of the callbacks.

    Attributes:
        endpoint: endpoint of this server.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        token: str,
        job_spec: dict[str, Any],
        buffers: Sequence[WireBuffer | None],
        handler: PeerHandler,
    ) -> None:
        self.endpoint = rendezvous.endpoint
        self._rendezvous = rendezvous
        self._token = token
        self._job_spec = job_spec
        self._buffers = buffers
        self._handler = handler
        self._stopping = threading.Event()
        self._admission = threading.Lock()
        self._undecided: set[int] = set()  # peers that were neither admitted nor rejected yet
        self._end: messages.End | None = None  # for processes that come after the run
        self._active: set[int] = set()  # peers that have sent something since the last check
        self._connections: dict[int, Connection] = {}
        self._threads: dict[int, threading.Thread] = {0: threading.Thread(target=self._watch, daemon=True)}
        self._threads[0].start()

    def was_active(self, peer_id: int) -> bool:
        """Return whether a peer has sent something since the previous call for it."""
        was_active = peer_id in self._active
        self._active.discard(peer_id)
        return was_active

    def disconnect(self, peer_id: int, timeout_s: float = 0.0) -> None:
        """Close the connection to a peer, which ends its receive loop.

        Args:
            peer_id: id of the peer.
            timeout_s: seconds to wait for the end of the loop; 0 in a callback, which the loop itself makes.
        """
        connection = self._connections.get(peer_id)
        if connection is not None:
            connection.close()
        if timeout_s:
            self.join([peer_id], timeout_s)

    def join(self, peer_ids: list[int], timeout_s: float) -> None:
        """Wait until these peers have closed their connections, for some time."""
        deadline_s = time.monotonic() + timeout_s
        for peer_id in peer_ids:
            if (thread := self._threads.get(peer_id)) is not None:
                thread.join(max(0.0, deadline_s - time.monotonic()))

    def announce_end(self, end: messages.End) -> None:
        """Send the end of the run to new peers from now on, instead of admitting them."""
        with self._admission:
            self._end = end
        with suppress(RuntimeError):  # the store may be gone
            self._rendezvous.publish_end(sign_end(end, self._token))

    def close(self) -> bool:
        """Stop to admit peers and close all connections; return whether no thread is left."""
        self._stopping.set()
        self._threads[0].join(GRACE_S)
        if self._end is not None:
            self.join(list(self._undecided), GRACE_S)
        for peer_id in list(self._connections):
            self.disconnect(peer_id, GRACE_S)
        self.join(list(self._threads), GRACE_S)
        return not any(thread.is_alive() for thread in list(self._threads.values()))

    def _watch(self) -> None:
        while not self._stopping.wait(self._rendezvous.poll_s):
            self._accept_new_peers()
        self._accept_new_peers()

    def _accept_new_peers(self) -> None:
        for peer_id in self._rendezvous.new_peers():
            self._undecided.add(peer_id)
            thread = threading.Thread(target=self._serve, args=(peer_id,), daemon=True)
            self._threads[peer_id] = thread
            thread.start()

    def _serve(self, peer_id: int) -> None:
        """Serve a peer until its connection ends, and release everything that belongs to it."""
        try:
            with suppress(ConnectionLost):  # the peer has gone
                connection = self._connections[peer_id] = self._rendezvous.accept(peer_id)
                self._authenticate(peer_id, connection)
        finally:
            self._undecided.discard(peer_id)
            self._connections.pop(peer_id, None)
            del self._threads[peer_id]

    def _authenticate(self, peer_id: int, connection: Connection) -> None:
        try:
            hello = authenticate_peer(connection, self._token, self._job_spec, len(self._buffers))
        except JoinRejected as rejected:
            self._report_rejection(connection, rejected)
        except (ConnectionLost, ValueError):
            connection.close()
        else:
            rank_0_id = hello.peer_id or peer_id
            self._run(AcceptedPeer(peer_id, hello.worker, connection, hello.name, hello.has_own_gpu, rank_0_id))

    def _report_rejection(self, connection: Connection, rejected: JoinRejected) -> None:
        """Report a peer that may not take part, after it has received the reason and gone."""
        with suppress(ConnectionLost):
            connection.recv()
        if rejected.has_token:
            self._handler.on_reject(str(rejected))
        else:
            LOG.warning("rejected a connection: %s", rejected)

    def _run(self, peer: AcceptedPeer) -> None:
        """Admit a peer and receive its messages until the connection ends."""
        try:
            buffer = self._buffers[peer.worker]
            if buffer is not None:
                peer.connection.post_buckets(buffer.buckets)
            if self._admit(peer):
                self._receive(peer, buffer)
        except ConnectionLost as error:
            self._handler.on_leave(peer, str(error))
        except Exception as error:  # no thread receives from this peer any more, so the run may not wait for it
            self._handler.fail(error)

    def _admit(self, peer: AcceptedPeer) -> bool:
        """Admit a peer, or send it the end of the run; return whether it takes part."""
        with self._admission:
            end = self._end
            if end is None:
                peer.connection.send(messages.Accepted())
                self._handler.on_join(peer)
                self._undecided.discard(peer.peer_id)
                return True
        peer.connection.send(end)
        with suppress(ConnectionLost):
            peer.connection.recv()  # until the peer has gone
        return False

    def _receive(self, peer: AcceptedPeer, buffer: WireBuffer | None) -> None:
        task_s = None  # arrival of the task at the worker, if it has sent a first bucket
        while True:
            message = peer.connection.recv()
            at_s = time.monotonic()
            self._active.add(peer.peer_id)
            match message:
                case task_messages.Heartbeat():
                    continue
                case task_messages.GradientStarted(_, busy_s):
                    task_s = at_s - busy_s
                    continue
                case task_messages.RemoteTaskDone() if task_s is not None:
                    at_s = task_s + message.busy_s  # the header itself has waited behind buckets
            if isinstance(message, ANSWERS):
                if buffer is not None:
                    _receive_buckets(peer.connection, buffer, message)
                peer.connection.release_sent()
                task_s = None
            self._handler.on_message(peer, message, at_s, time.monotonic() - at_s)


def _receive_buckets(connection: Connection, buffer: WireBuffer, message: Message) -> None:
    """Wait for the buckets of the gradient to which a message belongs."""
    match message:
        case task_messages.RemoteTaskDone():
            connection.recv_buckets(range(len(buffer.buckets)))
            for number in range(len(buffer.buckets)):
                buffer.unpack(number)
            for number in from_bitmask(message.resent):
                connection.recv_into(buffer.buckets[number])
                buffer.unpack(number)
        case task_messages.RemoteTaskCancelled():
            connection.recv_early_buckets(from_bitmask(message.sent))


def await_peers(missing: Callable[[], str], wait: Callable[[], None], timeout_s: float) -> None:
    """Wait until all peers have joined.

    Args:
        missing: names of the peers that have not joined, empty if all have.
        wait: waits for a moment and handles what happens meanwhile.
        timeout_s: seconds until the wait fails.

    Raises:
        RunError: a peer did not join in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while named := missing():
        if time.monotonic() > deadline_s:
            raise RunError(f"{named} did not join within start_timeout_s={timeout_s:g}: check its log")
        wait()
