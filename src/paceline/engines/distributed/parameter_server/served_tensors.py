"""Tensors of a run with a server: versions go to the workers, and gradients come from them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import SharesMemory
from paceline.engines.distributed.coordinator_tensors import CoordinatorTensors, SentVersion, Taken
from paceline.engines.distributed.parameter_server.gradient_receiver import GradientReceiver
from paceline.engines.distributed.parameter_server.host_memory import HostMemory
from paceline.engines.distributed.parameter_server.link_utilization import LinkMonitor
from paceline.engines.distributed.parameter_server.published_versions import PublishedVersions
from paceline.engines.distributed.parameter_server.remote_worker import ArrivingGradient, RemoteWorker
from paceline.engines.distributed.parameter_server.shard_clients import ShardClients
from paceline.engines.distributed.rendezvous.acceptor import PeerHandler
from paceline.engines.distributed.standby.standby_stream import StandbyStream
from paceline.engines.distributed.transport.memory_messages import GradientMapped, MemoryMapped
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.wire import Wire, WireBuffer
from paceline.engines.distributed.transport.wires import make_wire
from paceline.engines.server_side import ServerSide
from paceline.processes.shared_memory import SharedBuffers
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from paceline.utils.rank_logger import RankLogger
from paceline.worker.parameter_guard import checksum

LOG = RankLogger(__name__)


class ServedTensors(CoordinatorTensors):
    """Versions of a server in this process, and the gradients that come over the network.

    Args:
        cluster: launch settings of this process.
        server: server of the parameters, or of their first shard.
        published: versions of the server.
        layout: layout of what the server holds.
        wire: format of the gradients on the network.
        shards: clients of the servers of the other shards.
        handler: receiver of messages.
        memory: memory that the workers of this host map; None without any.
    """

    parameters: ServerSide

    def __init__(
        self,
        cluster: Torchrun,
        server: ParameterServer,
        published: PublishedVersions,
        *,
        layout: FlatLayout,
        wire: Wire,
        shards: ShardClients,
        handler: PeerHandler,
        memory: HostMemory | None,
    ) -> None:
        self._memory = memory
        self._debug = cluster.debug
        self._server = server
        self._published = published
        self._shards = shards
        self._received = [layout.allocate() for _ in range(cluster.n)]
        self._gradients = gradients = list(self._received)
        others = shards if shards.numbers else None
        self.parameters = ServerSide(
            server,
            published,
            gradients,
            shards=others,
            debug=cluster.debug,
            deterministic=cluster.deterministic,
        )
        self.receiver = GradientReceiver([WireBuffer(wire, each) for each in self._received], handler)
        self._link_monitor = LinkMonitor(cluster.n, _shard_nbytes(cluster, server), cluster.bytes_per_s)

    @property
    def is_busy(self) -> bool:
        """Whether the coordinator waits for the workers: never."""
        return False

    def begin(self, workers: Iterable[RemoteWorker]) -> None:
        """Begin at the servers of the other shards; each worker gets its version with its task."""
        if self._memory is not None and self._memory.is_shared:
            self._memory.is_shared = self._shards.share(self._memory.offer_versions())
        self._shards.init(self.parameters.first_version)
        self._offer(workers)

    def follow(self, stream: StandbyStream) -> None:
        """Send a standby the mean gradient of each update."""
        self._server.on_mean = stream.add_mean

    def take_over(self, workers: Iterable[RemoteWorker], newest: int) -> Taken:
        """Go on with the version that the standby has made."""
        self._offer(workers)
        return Taken(newest)

    def admit(self, worker: RemoteWorker) -> None:
        """Share memory with a worker of this host."""
        self._offer([worker])

    def _offer(self, workers: Iterable[RemoteWorker]) -> None:
        for worker in workers:
            if self._memory is not None and self._memory.is_shared and worker.connection.is_on_this_host:
                worker.connection.send(self._memory.offer(worker.peer_id))

    def version_for(self, worker: RemoteWorker, version: int) -> SentVersion:
        """Return the version, if the worker does not have it."""
        is_new = worker.newest_sent != version
        storage = self._published[version]
        shared = self._memory.gradient(worker.peer_id) if self._memory is not None else None
        if shared is not None and isinstance(storage, SharedBuffers):
            self._gradients[worker.worker] = shared
            return SentVersion(is_new, slot=storage.slot)
        self._gradients[worker.worker] = self._received[worker.worker]
        buckets, is_difference = self._published.message(worker.peer_id, version, is_new)
        held = checksum(self._published.held_by(worker.peer_id, version)) if self._debug else None
        return SentVersion(is_new, buckets, is_difference, held)

    def on_message(self, worker: RemoteWorker, message: Message, now_s: float) -> SharesMemory | None:
        """Note that a worker shares memory; gradients are received before."""
        if self._memory is None or not isinstance(message, MemoryMapped) or not message.is_mapped:
            return None
        self._shards.send(GradientMapped(worker.peer_id, self._memory.mapped(worker.peer_id)))
        return SharesMemory(now_s, worker.worker)

    def on_gradient(self, worker: int, arriving: ArrivingGradient, seconds: float) -> None:
        """Note how long the link of this process was used for a gradient, if it was sent."""
        done = arriving.done
        if not done.is_notice and self._gradients[worker] is self._received[worker]:
            self._log(self._link_monitor.on_gradient(worker, done.measured.compute_s, seconds))

    def settle(self) -> None:
        """Do nothing: the others do not need a worker that is gone."""

    def leaving(self) -> None:
        """Do nothing, as `settle`."""

    def lose(self, worker: RemoteWorker) -> None:
        """Count with the link of one worker less, and forget its memory."""
        if self._memory is not None:
            self._memory.forget(worker.peer_id)
        self._log(self._link_monitor.on_lost(worker.worker))

    def ended(self) -> None:
        """Bring the parameters of the other shards here, and the state of their optimizers if that is wanted."""
        self._log(self._link_monitor.final_report())
        if self._shards.gathers_optimizer:
            self._server.optimizer.load_state_dict(self._server.state_dict()["optimizer"])
        else:
            self._server.gather_shards()

    def close(self) -> None:
        """Close the files of shared memory."""
        if self._memory is not None:
            self._memory.close()

    def _log(self, report: str | None) -> None:
        if report is not None:
            LOG.log(logging.WARNING if self._link_monitor.is_bottleneck else logging.INFO, "%s", report)


def _shard_nbytes(cluster: Torchrun, server: ParameterServer) -> list[int]:
    """Return the bytes of each shard on the wire."""
    layouts = [FlatLayout(server.model, cluster.shards, only=number) for number in range(cluster.shards)]
    return [make_wire(cluster.wire, layout).nbytes for layout in layouts]
