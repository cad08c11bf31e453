"""Groups for sums, as the coordinator forms them: that of all ranks, and one of itself with each rank for states."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup
from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer, PeerHandler
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.sum_messages import FormGroup, SendState, StoreKey
from paceline.engines.distributed.transport.transport import Transport
from paceline.errors import RunError

SUMS = 1  # number of the group of all ranks; those of the coordinator with a rank follow
KEY_BYTES = 32


class StateGroup(NamedTuple):
    """Group of the coordinator, its rank 0, with one rank of the run."""

    group: ElasticGroup
    store: GroupStore


class SumGroups:
    """Groups for sums, at the coordinator, which takes no part in the sums.

    It relays the keys by which the processes of a group find each other in the thread of the sockets, and passes all
    other messages on.

    Args:
        handler: receiver of all messages but keys.
        transport: transport of this process.
        workers: number of workers.
    """

    def __init__(self, handler: PeerHandler, transport: Transport, workers: int) -> None:
        self._handler = handler
        self._transport = transport
        self._workers = workers
        self._lock = threading.Lock()
        self._members: dict[int, AcceptedPeer] = {}  # by worker
        self._states: dict[int, StateGroup] = {}  # by worker

    def form(self, state: Mapping[str, Any]) -> None:
        """Form all groups, and give each rank the state with which it begins.

        Raises:
            RunError: a rank is gone.
        """
        for worker in sorted(self._members):
            self._form_for_states(worker, state)
        key = secrets.token_hex(KEY_BYTES)
        for rank, worker in enumerate(sorted(self._members)):
            form = FormGroup(generation=SUMS, key=key, rank=rank, size=len(self._members), uses_nccl=False)
            self._members[worker].connection.send(form)

    def send(self, message: Message) -> None:
        """Send a message to all ranks."""
        for member in self._members.values():
            member.connection.send(message)

    def state(self) -> dict[str, Any]:
        """Return the state of the first rank's server, after all that it was sent.

        Raises:
            RunError: the rank is gone.
        """
        worker = min(self._states, default=None)
        if worker is None:
            raise RunError("no rank has joined the run")
        self._members[worker].connection.send(SendState())
        try:
            return self._states[worker].group.broadcast_state(None, root=1)
        except ConnectionLost as error:
            raise RunError(f"worker {worker} does not send its state: {error}") from error

    def close(self) -> None:
        """Destroy the groups; the ranks have ended."""
        for each in self._states.values():
            each.group.close()
        self._states = {}

    def _form_for_states(self, worker: int, state: Mapping[str, Any]) -> None:
        peer, key = self._members[worker], secrets.token_hex(KEY_BYTES)
        generation = self._generation(worker)
        store = GroupStore(generation, peer.connection.send)
        group = ElasticGroup(key, 0, 2, store)
        with self._lock:
            self._states[worker] = StateGroup(group, store)
        peer.connection.send(FormGroup(generation=generation, key=key, rank=1, size=2, uses_nccl=False))
        try:
            group.connect(self._transport, peer.connection.local_host)
            group.broadcast_state(dict(state))
        except ConnectionLost as error:
            raise RunError(f"worker {worker} is gone: {error}") from error

    def _generation(self, worker: int) -> int:
        return SUMS + 1 + worker

    # --- callbacks of the acceptor, in the thread of the sockets ------------------------------------------------------

    def on_accept(self, peer: AcceptedPeer) -> None:
        """Do nothing: no gradient is received."""

    def on_join(self, peer: AcceptedPeer) -> None:
        """Note a rank, and pass it on."""
        if peer.worker < self._workers:
            self._members[peer.worker] = peer
        self._handler.on_join(peer)

    def on_message(self, peer: AcceptedPeer, message: Message, at_s: float, contents_s: float) -> None:
        """Relay a key, and pass any other message on."""
        if not isinstance(message, StoreKey):
            self._handler.on_message(peer, message, at_s, contents_s)
        elif message.generation == SUMS:
            for member in self._members.values():
                if member.worker != peer.worker:
                    member.connection.send(message)
        elif message.generation == self._generation(peer.worker):
            with self._lock:
                own = self._states.get(peer.worker)
            if own is not None:
                own.store.put(message)

    def on_leave(self, peer: AcceptedPeer, reason: str) -> None:
        """End all waiting for a rank that is gone, and pass that on."""
        with self._lock:
            own = self._states.get(peer.worker)
        if own is not None:
            own.group.abort()
        self._handler.on_leave(peer, reason)

    def on_reject(self, reason: str) -> None:
        """Pass on a process that may not take part."""
        self._handler.on_reject(reason)

    def fail(self, error: Exception) -> None:
        """Pass on an error in another callback."""
        self._handler.fail(error)
