"""Groups for sums, as the coordinator forms them: that of all ranks, and one of itself with each rank for states."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup
from paceline.engines.distributed.allreduce.members import have_own_gpus
from paceline.engines.distributed.announced_sums.early_rounds import EarlyRounds
from paceline.engines.distributed.parameter_server.remote_worker import RemoteWorker
from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer, PeerHandler
from paceline.engines.distributed.transport.announced_messages import BeginShards
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.sum_messages import FormGroup, GroupBroken, StoreKey
from paceline.engines.distributed.transport.transport import Transport

KEY_BYTES = 32


class StateGroup(NamedTuple):
    """Group of the coordinator, its rank 0, with one rank of the run."""

    generation: int
    group: ElasticGroup
    store: GroupStore


class SumGroups:
    """Groups for sums, at the coordinator, which takes no part in the sums.

    It relays the keys by which the processes of a group find each other in the thread of the sockets, and passes all
    other messages on.

    Args:
        handler: receiver of all messages but keys.
        transport: transport of this process.
        rounds: rounds of early sums.
        group_size: ranks of each worker; with several, each has a shard, so that no state comes from here.

    Attributes:
        rounds: as given.
        group_size: as given.
        are_sharded: whether it is more than 1.
        generation: number of the group of all ranks; 0 before there is one.
        is_broken: whether that group has lost a member, so that another one has to form.
    """

    def __init__(self, handler: PeerHandler, transport: Transport, rounds: EarlyRounds, *, group_size: int = 1) -> None:
        self.rounds = rounds
        self.group_size = group_size
        self.are_sharded = group_size > 1
        self._handler = handler
        self._transport = transport
        self._numbers = itertools.count(1)
        self._members: dict[int, RemoteWorker] = {}  # by worker
        self._lock = threading.Lock()
        self._relayed: list[RemoteWorker] = []  # members of the newest group, for the thread of the sockets
        self._states: dict[int, StateGroup] = {}  # by id of the process
        self.generation = 0
        self.is_broken = False

    @property
    def members(self) -> Mapping[int, RemoteWorker]:
        """Ranks that sum, by their worker."""
        return self._members

    def add(self, worker: RemoteWorker, state: Mapping[str, Any]) -> bool:
        """Give a rank the state with which it begins, for the next group; return False if it is gone."""
        key, number = secrets.token_hex(KEY_BYTES), next(self._numbers)
        if self.are_sharded:
            begin = BeginShards(**state, generation=number, key=key)
            worker.connection.send(begin)
            self._members[worker.worker] = worker
            return True
        store = GroupStore(number, worker.connection.send)
        group = ElasticGroup(key, 0, 2, store)
        with self._lock:
            self._states[worker.peer_id] = StateGroup(number, group, store)
        worker.connection.send(FormGroup(generation=number, key=key, rank=1, size=2, uses_nccl=False))
        try:
            group.connect(self._transport, worker.connection.local_host)
            group.broadcast_state(dict(state))
        except ConnectionLost:
            return False  # its loss is an event that follows
        self._members[worker.worker] = worker
        return True

    def form(self) -> None:
        """Form a group of all members, which takes the place of the previous one after the sums so far."""
        key, number = secrets.token_hex(KEY_BYTES), next(self._numbers)
        with self._lock:
            self.generation = number
            self._relayed = list(self._members.values())
        self.rounds.form(number, self._members)
        uses_nccl = have_own_gpus([member.gpu for member in self._members.values()])
        for rank, worker in enumerate(sorted(self._members)):
            form = FormGroup(
                generation=number,
                key=key,
                rank=rank,
                size=len(self._members),
                uses_nccl=uses_nccl,
                sums_early=self.rounds.is_certain,
            )
            self._members[worker].connection.send(form)

    def reform(self) -> None:
        """Form a group of the members that are left, at once: sums in progress end without a result."""
        self.is_broken = False
        self.send(GroupBroken(self.generation, "a member is gone", is_unreachable=False))
        self.form()

    def remove(self, worker: RemoteWorker) -> bool:
        """Note that a rank is gone; return whether it was a member."""
        with self._lock:
            own = self._states.pop(worker.peer_id, None)
        if own is not None:
            own.group.close()
        if self._members.get(worker.worker) is not worker:
            return False
        del self._members[worker.worker]
        self.is_broken = bool(self._members)
        return True

    def send(self, message: Message) -> None:
        """Send a message to all members."""
        for member in self._members.values():
            member.connection.send(message)

    def receive_state(self, worker: RemoteWorker) -> dict[str, Any]:
        """Return the state that a rank sends.

        Raises:
            ConnectionLost: the rank is gone.
        """
        return self._states[worker.peer_id].group.broadcast_state(None, root=1)

    def close(self) -> None:
        """Destroy the groups; the ranks have ended."""
        for each in self._states.values():
            each.group.close()
        self._states = {}

    # --- callbacks of the acceptor, in the thread of the sockets ------------------------------------------------------

    def on_accept(self, peer: AcceptedPeer) -> None:
        """Do nothing: no gradient is received."""

    def on_join(self, peer: AcceptedPeer) -> None:
        """Pass on a new process."""
        self._handler.on_join(peer)

    def on_message(self, peer: AcceptedPeer, message: Message, at_s: float, contents_s: float) -> None:
        """Relay a key, and pass any other message on."""
        if not isinstance(message, StoreKey):
            self._handler.on_message(peer, message, at_s, contents_s)
            return
        with self._lock:
            own = self._states.get(peer.peer_id)
            # A group may still be forming when the next one is announced, which waits for it.
            receivers = self._relayed if message.generation <= self.generation else []
        if own is not None and own.generation == message.generation:
            own.store.put(message)
        elif any(member.peer_id == peer.peer_id for member in receivers):
            for member in receivers:
                if member.peer_id != peer.peer_id:
                    member.connection.send(message)

    def on_leave(self, peer: AcceptedPeer, reason: str) -> None:
        """End all waiting for a rank that is gone, and pass that on."""
        with self._lock:
            own = self._states.get(peer.peer_id)
        if own is not None:
            own.group.abort()
        self._handler.on_leave(peer, reason)

    def on_reject(self, reason: str) -> None:
        """Pass on a process that may not take part."""
        self._handler.on_reject(reason)

    def fail(self, error: Exception) -> None:
        """Pass on an error in another callback."""
        self._handler.fail(error)
