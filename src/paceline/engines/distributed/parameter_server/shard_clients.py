"""Clients of the shard servers at rank 0: forward its commands, and collect sums and states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from paceline.checkpoint import codec
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Accept, Apply, Arrival
from paceline.core.sharding import ShardPeers
from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer, PeerEvent, PeerLost, PeerMessage
from paceline.engines.distributed.transport import messages, task_messages
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.encoded import encoded
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.memory_messages import MemoryMapped, MemoryOffered
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.transport import Address
from paceline.errors import RunError


class HasConnection(Protocol):
    """Process at the other side of a connection."""

    @property
    def connection(self) -> Connection:
        """Connection to the process."""


class ShardClients(ShardPeers):
    """Servers of shards 1 to m - 1, which repeat all commands of rank 0 in the same order.

    They may be behind rank 0 by at most one update.

    Args:
        ranks: ranks beside which the servers run, with rank 0 for the first shard.

    Attributes:
        numbers: numbers of the shards.
        events: queue in which the messages of the servers arrive.
        gathers_optimizer: whether the state of the optimizer is brought to rank 0 at the end.
        step_options: returns the newest options of steps that the loops of workers have set, encoded.
    """

    events: EventQueue[PeerEvent]
    step_options: Callable[[], bytes]

    def __init__(self, ranks: Sequence[int]) -> None:
        self.numbers = range(1, len(ranks))
        self.gathers_optimizer = False
        self._ranks = ranks
        self._connections: dict[int, Connection] = {}  # by shard
        self._addresses: dict[int, Address] = {}  # by shard, of those that listen
        self._numbers: dict[int, int] = {}  # shard, by peer id
        self._busy: set[int] = set()  # shards that have not made the newest update yet
        self._loaded: Mapping[str, Any] | None = None

    @property
    def missing(self) -> list[int]:
        """Shards whose server does not listen yet."""
        return [number for number in self.numbers if number not in self._addresses]

    def number_of(self, peer_id: int) -> int | None:
        """Return the shard of the server with this peer id, None for another process."""
        return self._numbers.get(peer_id)

    def on_join(self, number: int, peer: AcceptedPeer) -> None:
        """Add the server of a shard; a second server for the same shard has to end."""
        if number in self._connections:
            peer.connection.send(messages.End("", f"shard {number} already has a server"))
            return
        peer.connection.accepts_state = True  # rank 0 gathers its state, unlike that of a worker
        peer.connection.send(messages.ShardAssigned(number))
        self._connections[number] = peer.connection
        self._numbers[peer.peer_id] = number

    def on_listening(self, number: int, port: int) -> None:
        """Record that the server of a shard listens on this port of its host."""
        self._addresses[number] = self._connections[number].peer_host, port

    def send_addresses(self, workers: Iterable[HasConnection]) -> None:
        """Send the addresses of all servers to workers, once all servers listen."""
        if self.numbers and not self.missing:
            addresses = messages.ShardAddresses(encoded([self._addresses[number] for number in self.numbers]))
            for worker in workers:
                worker.connection.send(addresses)

    @property
    def peer_ids(self) -> list[int]:
        """Ids of the servers that are connected."""
        return [peer_id for peer_id, number in self._numbers.items() if number in self._connections]

    # --- commands -----------------------------------------------------------------------------------------

    def init(self, version: int) -> None:
        """Start all servers from this version, and from the state that was loaded."""
        tensors: dict[str, Any] = {}
        state = json.dumps(codec.encode(dict(self._loaded), tensors)) if self._loaded is not None else ""
        self._loaded = None
        self.send(messages.InitShard(state, version, tensors=tensors))

    def share(self, offer: MemoryOffered) -> bool:
        """Let all servers map the memory of rank 0; return whether each of them has done so."""
        if not all(connection.is_on_this_host for connection in self._connections.values()):
            return False
        self.send(offer)
        answers = [self._await(number, lambda message: isinstance(message, MemoryMapped)) for number in self.numbers]
        return all(answer.is_mapped for answer in answers)

    def send(self, message: Message) -> None:
        """Send a message to all servers."""
        for connection in self._connections.values():
            connection.send(message)

    def apply(self, update: Apply, is_read: bool) -> None:
        """Send an update to all servers when they have made the previous one.

        Args:
            update: update to make.
            is_read: whether the previous version is still read.
        """
        for number in list(self._busy):
            self.on_message(number, self._await(number, lambda message: isinstance(message, task_messages.UpdateDone)))
        command = task_messages.ApplyUpdate(encoded(update), is_read, self.step_options())
        for number, connection in self._connections.items():
            connection.send(command)
            self._busy.add(number)

    def accept(self, command: Accept, below: float) -> None:
        """Add the parts of a gradient to the pending update, and then those of workers below a number."""
        accept = task_messages.AcceptGradient
        self.send(accept(worker=command.worker, weight=command.weight, step_scale=command.step_scale, below=below))

    def compensate(self, arrival: Arrival, coordinator: Coordinator, version: int) -> None:
        """Compensate the parts of a gradient that was computed at this version."""
        compensators = [repr(each) for each in coordinator.compensators]
        staleness = coordinator.version - version
        self.send(
            task_messages.CompensateGradient(
                compensators=compensators,
                worker=arrival.worker,
                version=version,
                staleness=staleness,
                squared_norm=arrival.measured.squared_norm,
            )
        )

    # --- answers ------------------------------------------------------------------------------------------

    def on_message(self, number: int, message: Message) -> None:
        """Handle a message of a server about itself.

        Raises:
            UsageError: the server cannot work with this job.
            RunError: the server has failed.
        """
        match message:
            case task_messages.UpdateDone(_, not_finite):
                self._busy.discard(number)
                self.not_finite = self.not_finite or not_finite
            case messages.Failed() as failed:
                if failed.is_usage:
                    raise failed.error
                raise RunError(f"the server of shard {number} failed: {failed.message}; its own log has the traceback")

    def on_leave(self, number: int, reason: str) -> None:
        """Fail the run: no other process has the parameters of this shard.

        Raises:
            RunError: always.
        """
        del self._connections[number]
        raise RunError(
            f"the server of shard {number}, beside rank {self._ranks[number]}, is gone: {reason}; its parameters exist "
            "nowhere else, so check the log of its host, start all ranks again, and continue with resume=, as torchrun "
            "does itself with --max-restarts and out="
        )

    def summed(self, shares: Sequence[float]) -> list[float]:
        """Return the sums over all shards, and send them to all servers."""
        theirs = [
            self._await(number, lambda message: isinstance(message, task_messages.PartialSums))
            for number in self.numbers
        ]
        totals = [sum(each) for each in zip(*[shares, *(each.values for each in theirs)], strict=True)]
        self.send(task_messages.PartialSums(totals))
        return totals

    def gather(self, part: Literal["state", "model"]) -> list[dict[str, Any]]:
        """Return the state of each server, or its part of the model."""
        self.send(messages.RequestShardState(part))
        answers = [
            self._await(number, lambda message: isinstance(message, messages.ShardState) and message.part == part)
            for number in self.numbers
        ]
        return [codec.decode(json.loads(answer.state), answer.tensors) for answer in answers]

    def load(self, state: Mapping[str, Any]) -> None:
        """Keep a state from which the servers start."""
        self._loaded = state if self.numbers else None

    def _await(self, number: int, is_answer: Callable[[Message], bool]) -> Any:
        """Wait for a server's answer; all other events stay in the queue."""
        [peer_id] = [peer_id for peer_id, other in self._numbers.items() if other == number]

        def is_wanted(event: PeerEvent) -> bool:
            if isinstance(event, PeerLost):
                return event.peer_id in self._numbers  # the loss of any server ends the run
            if not isinstance(event, PeerMessage) or event.peer_id != peer_id:
                return False
            return is_answer(event.message) or isinstance(event.message, messages.Failed)

        event = self.events.get_first(is_wanted)
        if isinstance(event, PeerLost):
            self.on_leave(self._numbers[event.peer_id], event.reason)
        assert isinstance(event, PeerMessage)
        if not is_answer(event.message):
            self.on_message(number, event.message)
        return event.message
