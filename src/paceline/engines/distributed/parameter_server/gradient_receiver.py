"""Receiver of gradients: unpacks each as it arrives at a server, and knows when its worker had completed it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer, PeerHandler
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.task_messages import GradientStarted, RemoteTaskCancelled, RemoteTaskDone
from paceline.engines.distributed.transport.wire import WireBuffer


class GradientReceiver:
    """Receiver of the gradients of workers, before their messages reach a handler.

    For a gradient whose buckets were sent early, the arrival of its last message is the moment at which the worker had
    completed it: the message itself has waited behind the buckets.

    Args:
        gradients: by number of the process, memory for the gradients of a worker; other processes have none.
        handler: receiver of all messages but those about the beginning of a gradient.
    """

    def __init__(self, gradients: Sequence[WireBuffer], handler: PeerHandler) -> None:
        self._gradients = dict(enumerate(gradients))
        self._handler = handler
        self._tasks_s: dict[int, float] = {}  # arrival of the task at each worker that has sent a first bucket

    def on_accept(self, peer: AcceptedPeer) -> None:
        """Give the connection of a worker the memory for its gradients."""
        if (gradient := self._gradients.get(peer.worker)) is not None:
            peer.connection.post_buckets(gradient.buckets)

    def on_join(self, peer: AcceptedPeer) -> None:
        """Pass on a new peer."""
        self._handler.on_join(peer)

    def on_message(self, peer: AcceptedPeer, message: Message, at_s: float, contents_s: float) -> None:
        """Pass on a message, for a gradient with the moment of its completion."""
        match message:
            case GradientStarted(_, busy_s):
                self._tasks_s[peer.peer_id] = at_s - busy_s
                return
            case RemoteTaskDone(busy_s=busy_s, is_notice=is_notice):
                task_s = self._tasks_s.pop(peer.peer_id, None)
                if task_s is not None:
                    done_s = min(at_s, task_s + busy_s)
                    contents_s += at_s - done_s
                    at_s = done_s
                if not is_notice and (gradient := self._gradients.get(peer.worker)) is not None:
                    gradient.unpack()
            case RemoteTaskCancelled():
                self._tasks_s.pop(peer.peer_id, None)
        self._handler.on_message(peer, message, at_s, contents_s)

    def on_leave(self, peer: AcceptedPeer, reason: str) -> None:
        """Pass on the end of a connection."""
        self._tasks_s.pop(peer.peer_id, None)
        self._handler.on_leave(peer, reason)

    def on_reject(self, reason: str) -> None:
        """Pass on a process that may not take part."""
        self._handler.on_reject(reason)

    def fail(self, error: Exception) -> None:
        """Pass on an error in another callback."""
        self._handler.fail(error)
