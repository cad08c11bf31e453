"""Engine of rank 0 with a standby."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.clusters.launch_env import STANDBY
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import AbortRun, Command, EndRun, Event
from paceline.engines.base import Observer
from paceline.engines.distributed.parameter_server.engine import ParameterServerEngine
from paceline.engines.distributed.parameter_server.remote_worker import RemoteWorker, processes_of
from paceline.engines.distributed.parameter_server.shard_clients import ShardClients
from paceline.engines.distributed.parameter_server.standby_stream import StandbyStream
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.acceptor import (
    GRACE_S,
    AcceptedPeer,
    Acceptor,
    PeerEvent,
    PeerLost,
    PeerMessage,
)
from paceline.engines.distributed.rendezvous.rendezvous import tell_launcher
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.standby_messages import StandbyForgotten, StandbyLost
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class HandedOver(SystemExit):
    """Exit of rank 0, which leaves the run to its standby."""


class FollowedEngine(ParameterServerEngine):
    """Parameter server engine that sends its events and the mean gradients of its updates to a standby.

    On a spot notice it closes all connections without a word, so that the standby goes on.

    Args:
        rank: settings of this process.
        server: server of the parameters.
        layout: layout of the model.
        shards: no shard but the first.
    """

    def __init__(self, rank: Rank, server: ParameterServer, layout: FlatLayout, shards: ShardClients) -> None:
        super().__init__(rank, server, layout, shards)
        self._hands_over = False
        self._standby = StandbyStream(
            layout, self._peer_events, lambda: processes_of(self._workers.values()), rank.folder
        )

    def _start_workers(self) -> None:
        super()._start_workers()
        self._standby.send_begin()
        self._server.on_mean = self._standby.add_mean

    def _missing(self) -> str:
        is_missing = self._standby.is_missing and not self.signals.caught
        return super()._missing() or ("the standby" if is_missing else "")

    def abort_by_signal(self) -> AbortRun:
        """Return the event of the signal; on a spot notice, leave the run to the standby.

        Raises:
            HandedOver: the standby has all updates, and goes on.
        """
        if self.signals.is_notice and self._standby.is_there:
            LOG.warning("%s: the standby goes on with the run", self.signals.caught)
            self._standby.flush()
            self._hands_over = True
            raise HandedOver(self._cluster.leaving_status)
        return super().abort_by_signal()

    def run(self, coordinator: Coordinator, observe: Observer | None = None, first: Event | None = None) -> EndRun:
        """Run to the end and return the last command; with `standby_sync`, observe what the standby has received."""

        def seen(now: float, event: Event | None, commands: Sequence[Command]) -> None:
            if self._cluster.standby_sync:
                self._standby.flush()
            if observe is not None:
                observe(now, event, commands)

        return super().run(coordinator, seen, first)

    def _advance(self) -> None:
        self._standby.send()
        super()._advance()

    def _following(self) -> Event:
        event = super()._following()
        self._standby.add(event)
        return event

    def _handle(self, event: PeerEvent) -> None:
        if isinstance(event, PeerMessage | PeerLost) and self._standby.is_from(event):
            self._standby.on_event(event)
            self._standby.send_address(self._peers.values())
            if self._standby.is_lost:
                for worker in self._peers.values():
                    worker.connection.send(StandbyLost())
        elif isinstance(event, PeerMessage) and isinstance(event.message, StandbyForgotten):
            if event.peer_id in self._peers:
                self._standby.forget(self._peers[event.peer_id].process)
        else:
            super()._handle(event)

    def _on_join(self, peer: AcceptedPeer) -> None:
        if peer.worker == self._cluster.standby_number:
            self._standby.on_join(peer)
            tell_launcher(self._cluster, STANDBY)
        else:
            super()._on_join(peer)
            self._standby.send_address([peer])

    def _on_gone(self, worker: RemoteWorker, reason: str) -> None:
        super()._on_gone(worker, reason)
        self._standby.check_workers()

    def _send_end(self, acceptor: Acceptor, end: messages.End) -> None:
        if self._hands_over:
            return
        peer_ids = self._standby.send_end(end)
        super()._send_end(acceptor, end)
        acceptor.join(peer_ids, GRACE_S)
