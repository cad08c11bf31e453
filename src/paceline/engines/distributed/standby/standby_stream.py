"""Stream from rank 0 to its standby: every event, and the mean gradient of every update."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from msgspec.structs import replace
from torch import Tensor

from paceline.core.events import Apply, Event
from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.parameter_server.shard_clients import HasConnection
from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer, PeerEvent, PeerLost, PeerMessage
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.encoded import encoded
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.standby_messages import (
    FollowedEvent,
    StandbyAddress,
    StandbyListens,
    UpdateReceived,
    joined_events,
)
from paceline.errors import RunError
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class StandbyStream:
    """Stream of what the standby needs to hold the same state as rank 0.

    A mean gradient is sent when this process has nothing else to do, after the workers have their tasks. The standby
    lacks at most the newest update, because an update waits until the standby has the one before.

    If the standby and most workers are lost together, they may go on without this process, so its run ends. Processes
    are counted, since another process with the number of a worker may be on either side. A worker that is still
    connected is told not to join the standby, and does not count once it has answered.

    Args:
        layout: layout of the gradients.
        events: queue in which the messages of the standby arrive.
        processes: function that returns the processes of the workers that are connected, as in `Hello`.
        options: function that returns the newest options of steps that the loops of workers have set, encoded.
        folder: folder of the run, for messages; None for a run without one.

    Attributes:
        is_missing: whether the standby has not joined yet.
        is_lost: whether the standby was lost, and may go on without this process.
    """

    def __init__(
        self,
        layout: FlatLayout,
        events: EventQueue[PeerEvent],
        processes: Callable[[], Collection[str]],
        options: Callable[[], bytes] = bytes,
        folder: str | Path | None = None,
    ) -> None:
        self.is_missing = True
        self._events = events
        self._processes = processes
        self._options = options
        self._folder = folder
        self._mean = layout.allocate()
        self._peer: AcceptedPeer | None = None
        self._address: StandbyAddress | None = None
        self._pending: list[FollowedEvent] = []
        self._unsent: messages.FollowUpdate | None = None
        self._sent = self._received = 0  # versions
        self.is_lost = False
        # The processes that the standby knows: those of the two newest messages, of which it may lack the last.
        self._told: deque[set[str]] = deque(maxlen=2)
        self._forgotten: set[str] = set()

    @property
    def is_there(self) -> bool:
        """Whether the standby follows this process."""
        return self._peer is not None and not self.is_missing

    def on_join(self, peer: AcceptedPeer) -> None:
        """Add the standby; one that comes back has missed updates, so it has to end."""
        if not self.is_missing or self._peer is not None:
            peer.connection.send(messages.End("", "the run has had a standby already"))
            return
        self._peer = peer

    def is_from(self, event: PeerMessage | PeerLost) -> bool:
        """Return whether an event is of the standby."""
        return self._peer is not None and event.peer_id == self._peer.peer_id

    def on_event(self, event: PeerMessage | PeerLost) -> None:
        """Handle a message or the loss of the standby."""
        assert self._peer is not None
        match event:
            case PeerLost(_, reason):
                LOG.warning("the standby is lost, and the run goes on without one: %s", reason)
                self._drop()
                self.is_lost = True
                self.check_workers()
            case PeerMessage(_, messages.Leave(reason)):
                LOG.warning("the standby leaves the run, which goes on without one: %s", reason)
                self._peer.connection.close()
                self._drop()
            case PeerMessage(_, StandbyListens(port)):
                self._address = StandbyAddress(self._peer.connection.peer_host, port)
                self.is_missing = False
            case PeerMessage(_, UpdateReceived(version)):
                self._received = version

    def _drop(self) -> None:
        self._peer = self._address = self._unsent = None
        self._pending = []

    def check_workers(self) -> None:
        """Check that the workers that are left have not all gone to the standby.

        Raises:
            RunError: the standby was lost, and fewer than half of the processes that it knows are left.
        """
        for known in self._told if self.is_lost else ():
            gone = known.difference(self._processes(), self._forgotten)
            if 2 * len(gone) > len(known):
                raise RunError(
                    f"the standby and {len(gone)} of {len(known)} workers cannot be reached: they may go on without "
                    f"this process, so it ends{where_the_state_lies(self._folder)}"
                )

    def forget(self, process: str) -> None:
        """Record that a process will not join the standby."""
        self._forgotten.add(process)

    def send_begin(self, first: str) -> None:
        """Send which processes take part at the beginning.

        Args:
            first: digest of the state with which the server begins; empty without a server.
        """
        if self._peer is not None:
            self._peer.connection.send(replace(self._followed(), first=first))

    def send_address(self, workers: Iterable[HasConnection]) -> None:
        """Tell workers where the standby listens."""
        if self._address is not None:
            for worker in workers:
                worker.connection.send(self._address)

    def add(self, event: Event) -> None:
        """Add an event that this process handles now."""
        if self._peer is not None:
            self._pending.append(FollowedEvent.of(event))

    def add_mean(self, mean: FlatBuffers, update: Apply) -> None:
        """Add the mean gradient of an update before its step, and the events up to it."""
        self.flush()  # whose memory is used again
        if self._peer is None:
            return
        self._mean.copy_(mean)  # it is sent later, and the server uses its memory again
        self._unsent = self._followed(update.version, mean.missing, mean=self._mean.memory)

    def add_update(self, update: Apply, made: int) -> None:
        """Send the events up to an update that the ranks make, and wait until the standby has them.

        Args:
            update: update that no rank makes before.
            made: newest version that all ranks are known to have.
        """
        if self._peer is not None:
            self._unsent = replace(self._followed(update.version), made=made)
            self.flush()

    def send(self) -> None:
        """Send the message about an update that has not been sent yet, if there is one."""
        if self._peer is not None and self._unsent is not None:
            self._peer.connection.send(self._unsent)
            self._sent, self._unsent = self._unsent.version, None

    def flush(self) -> None:
        """Wait until the standby has all updates that were made."""
        self.send()
        while self._peer is not None and self._received < self._sent:
            event = self._events.get_first(self._is_awaited)
            assert isinstance(event, PeerMessage | PeerLost)
            self.on_event(event)

    def send_end(self, end: messages.End) -> list[int]:
        """Send the end of the run; return the ids of the processes that it was sent to."""
        if self._peer is None:
            return []
        self.send()
        self._peer.connection.send(self._followed())
        self._peer.connection.send(end)
        return [self._peer.peer_id]

    def _followed(self, version: int = 0, missing: tuple[int, ...] = (), **tensors: Tensor) -> messages.FollowUpdate:
        """Return the message about all events since the last one."""
        events, self._pending = joined_events(self._pending), []
        processes = sorted(self._processes())
        self._told.append(set(processes))
        indices = IndexBits.of(missing).content
        return messages.FollowUpdate(
            events=events,
            version=version,
            missing=indices,
            processes=encoded(processes),
            options=self._options() if version else b"",
            tensors=tensors,
        )

    def _is_awaited(self, event: PeerEvent) -> bool:
        if isinstance(event, PeerLost):
            return self.is_from(event)
        awaited = UpdateReceived | messages.Leave
        return isinstance(event, PeerMessage) and self.is_from(event) and isinstance(event.message, awaited)


def where_the_state_lies(folder: str | Path | None) -> str:
    """Return where a run that ends has saved its state, as the end of a sentence."""
    if folder is None:
        return "; its state is lost, because the run has no folder (out=)"
    return f"; its newest checkpoint is in {folder}"
