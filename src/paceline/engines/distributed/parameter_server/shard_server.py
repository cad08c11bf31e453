"""Server of a shard other than the first: repeats the commands of rank 0 on its part of the vector."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Literal

from torch import Tensor, nn

from paceline.checkpoint.codec import decode, encode
from paceline.clusters.devices import cores
from paceline.core.index_bits import IndexBits
from paceline.core.sharding import ShardPeers
from paceline.engines.distributed.parameter_server.gradient_receiver import GradientReceiver
from paceline.engines.distributed.parameter_server.host_memory import OfferedShard
from paceline.engines.distributed.parameter_server.loop_options import set_step_options
from paceline.engines.distributed.parameter_server.published_versions import PublishedVersions
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.acceptor import (
    GRACE_S,
    AcceptedPeer,
    Acceptor,
    PeerEvent,
    PeerJoined,
    PeerLost,
    PeerMessage,
    QueueHandler,
)
from paceline.engines.distributed.rendezvous.rendezvous import join_rank_0
from paceline.engines.distributed.rendezvous.session import describe_process, raising_run_error
from paceline.engines.distributed.transport import messages, task_messages
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.memory_messages import GradientMapped, MemoryMapped, MemoryOffered
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.wire import Wire, WireBuffer
from paceline.engines.distributed.transport.wires import make_wire
from paceline.engines.signals import ignoring_ctrl_c
from paceline.errors import RunError
from paceline.policies.compensation.base import Compensator, compensators_of
from paceline.processes.shared_memory import SharedBuffers
from paceline.server.outer_optimizer import server_job
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
RANK_0 = 0  # peer id of rank 0; all others are counted from 1


def serve_shard(rank: Rank, model: nn.Module, job_spec: dict[str, Any]) -> messages.End:
    """Serve a shard until the run of rank 0 ends; return the end.

    Args:
        rank: settings of this process, with the number of the shard.
        model: model whose shard is served.
        job_spec: settings that must be equal on all processes.

    Raises:
        UsageError: rank 0 rejects this process.
        RunError: rank 0 is gone.
    """
    cluster = rank.cluster
    rank.host.lifecycle.set_num_threads(max(1, cores() // cluster.ranks.local_world_size))
    number = cluster.shard
    assert number is not None
    whole = FlatLayout(model, cluster.shards)
    layout = whole.shard_layouts[number]
    hello = messages.Hello.of(describe_process(f"the server of shard {number}", cluster), cluster.worker, job_spec)
    with raising_run_error(), ignoring_ctrl_c(), closing(join_rank_0(cluster, rank.transport, hello)) as session:
        if isinstance(end := session.connection.recv(), messages.End):
            return end  # the shard has a server: its rank was restarted, and has started this one too
        events: EventQueue[PeerEvent] = EventQueue()
        peers = _RankZero(session.connection, events)
        job = server_job(rank.job, rank.plan.local_steps)
        server = ParameterServer(
            job=job, model=model, layout=layout, per_epoch=rank.per_epoch, peers=peers, workers=cluster.n
        )
        if rank.plan.local_steps is None:
            server.watch_gradients()
        wire = make_wire(cluster.wire, layout, loads_numba=True)
        buffers = [WireBuffer(wire, layout.allocate()) for _ in range(cluster.n)]
        receiver = GradientReceiver(buffers, QueueHandler(events))
        host = session.connection.local_host
        acceptor = Acceptor(
            transport=rank.transport,
            host=host,
            port=0,
            job_spec=job_spec,
            processes=cluster.n + 1,  # the evaluator is number n
            handler=receiver,
            on_accept=receiver.on_accept,
        )
        session.connection.answers_heartbeats = False  # its main thread answers, so that one that hangs is detected
        session.listen(peers.on_message, peers.on_error)
        session.connection.send(messages.ShardListens(acceptor.address[1]))
        try:
            named = {repr(each): each for phase in rank.plan.phases for each in compensators_of(phase)}
            return _ShardServer(
                server=server,
                layout=whole,
                shard=number,
                wire=wire,
                received=[buffer.vectors for buffer in buffers],
                compensators=named,
                rank_0=session.connection,
                acceptor=acceptor,
            ).run(events)
        finally:
            acceptor.close()


class _RankZero(ShardPeers):
    """All other shards, through rank 0, which computes the sums."""

    def __init__(self, connection: Connection, events: EventQueue[PeerEvent]) -> None:
        self._connection = connection
        self._events = events

    def on_message(self, message: Message) -> None:
        self._events.put(PeerMessage(peer_id=RANK_0, message=message, at_s=time.monotonic(), contents_s=0.0))

    def on_error(self, error: Exception) -> None:
        self._events.put(PeerLost(RANK_0, str(error)))

    def summed(self, shares: Sequence[float]) -> list[float]:
        self._connection.send(task_messages.PartialSums(list(shares)))
        # A sum may take long, and this server must not count as lost meanwhile (decision 0010).
        while _is_heartbeat(event := self._events.get_first(_is_answer_or_end)):
            self._connection.send(task_messages.HeartbeatAnswer())
        if not isinstance(event, PeerMessage) or not isinstance(event.message, task_messages.PartialSums):
            raise ConnectionLost("it has ended the run")
        return event.message.values

    def gather(self, part: Literal["state", "model"]) -> list[dict[str, Any]]:
        """Return nothing: rank 0 gathers the states."""
        return []

    def load(self, state: Mapping[str, Any]) -> None:
        """Do nothing: rank 0 sends each server the state."""


def _is_heartbeat(event: PeerEvent) -> bool:
    return isinstance(event, PeerMessage) and isinstance(event.message, task_messages.Heartbeat)


def _is_answer_or_end(event: PeerEvent) -> bool:
    if isinstance(event, PeerMessage) and event.peer_id == RANK_0:
        return isinstance(event.message, task_messages.PartialSums | task_messages.Heartbeat | messages.End)
    return isinstance(event, PeerLost) and event.peer_id == RANK_0


class _ShardServer:
    def __init__(
        self,
        server: ParameterServer,
        layout: FlatLayout,
        shard: int,
        wire: Wire,
        received: list[FlatBuffers],
        compensators: dict[str, Compensator],
        rank_0: Connection,
        acceptor: Acceptor,
    ) -> None:
        self._server = server
        self._layout = layout
        self._shard = shard
        self._published = PublishedVersions(layout.shard_layouts[shard], wire, allocate=self._allocate)
        self._received = received
        self._gradients = list(received)  # by worker
        self._memory: OfferedShard | None = None
        self._shared: dict[int, FlatBuffers] = {}  # gradients in shared memory, by id at rank 0
        self._compensators = compensators
        self._rank_0 = rank_0
        self._acceptor = acceptor
        self._peers: dict[int, AcceptedPeer] = {}  # by id at rank 0
        self._rank_0_ids: dict[int, int] = {}  # by id here
        self._accepted = 0  # gradients of the update in progress
        self._below = 0.0  # number of the first worker that may still have one in it

    def run(self, events: EventQueue[PeerEvent]) -> messages.End:
        """Carry out the commands of rank 0, in its order, until the end of the run."""
        while True:
            if events.is_empty:
                self._server.accumulate(self._below)  # while there is nothing else to do
            match events.get():
                case PeerMessage(peer_id, messages.End() as end) if peer_id == RANK_0:
                    return end
                case PeerMessage(peer_id, task_messages.Heartbeat()) if peer_id == RANK_0:
                    self._rank_0.send(task_messages.HeartbeatAnswer())
                case PeerMessage(peer_id, message) if peer_id == RANK_0:
                    self._try(message)
                case PeerLost(peer_id, reason) if peer_id == RANK_0:
                    raise RunError(reason)
                case PeerJoined(peer):
                    self._on_join(peer)
                case PeerMessage(peer_id, task_messages.RemoteTaskDone() as done) if peer_id in self._rank_0_ids:
                    rank_0_id = self._rank_0_ids[peer_id]
                    self._gradients[self._peers[rank_0_id].worker].receive(IndexBits(done.missing))
                    self._rank_0.send(task_messages.GradientReceived(rank_0_id, done.draw))
                case PeerLost(peer_id, reason) if peer_id in self._rank_0_ids:
                    self._rank_0.send(messages.PeerDisconnected(self._rank_0_ids[peer_id], reason))
                case Exception() as error:
                    raise error

    def _on_join(self, peer: AcceptedPeer) -> None:
        self._peers[peer.rank_0_id] = peer
        self._rank_0_ids[peer.peer_id] = peer.rank_0_id
        self._rank_0.send(messages.PeerAdmitted(peer.rank_0_id))

    def _try(self, message: Message) -> None:
        try:
            self._carry_out(message)
        except (ConnectionLost, RunError):
            raise
        except Exception as error:
            LOG.exception("the server of this shard failed")
            self._rank_0.send(messages.Failed.of(error))

    def _carry_out(self, message: Message) -> None:
        match message:
            case task_messages.AssignTask():
                self._assign(message)
            case task_messages.AssignEvaluation(peer_id, version):
                self._send(peer_id, task_messages.RemoteEvaluateTask(version), [(0, self._published[version].memory)])
            case task_messages.AcceptGradient(worker=worker, weight=weight, step_scale=step_scale, below=below):
                self._server.enqueue(self._gradients[worker], weight, step_scale, worker)
                self._below = below
                self._accepted += 1
            case task_messages.ApplyUpdate():
                self._apply(message)
            case task_messages.ReleaseVersion(version):
                self._published.release(version)
            case task_messages.CompensateGradient(
                compensators=names, worker=worker, version=version, staleness=staleness, squared_norm=squared_norm
            ):
                compensators = [self._compensators[each] for each in names]
                gradient, then = self._gradients[worker], self._published[version]
                self._server.compensate(compensators, gradient, then, staleness, squared_norm)
            case MemoryOffered():
                self._rank_0.send(MemoryMapped(self._map(message)))
            case GradientMapped(peer_id, gradient) if self._memory is not None:
                self._shared[peer_id] = self._memory.gradient(gradient)
            case messages.RequestShardState(part):
                self._send_state(part)
            case messages.DisconnectPeer(peer_id):
                self._disconnect(peer_id)
            case messages.InitShard(state, version, tensors=tensors):
                if state:
                    self._server.load_state_dict(decode(json.loads(state), tensors))
                self._server.publish(self._add(version, self._published.free_storage()))
            case _:
                LOG.error("unknown message from rank 0: %r", message)

    def _assign(self, command: task_messages.AssignTask) -> None:
        worker, version = self._peers[command.peer_id].worker, command.version
        self._server.flush(worker)  # whose next gradient overwrites the previous one
        is_shared = command.slot >= 0
        self._gradients[worker] = self._shared[command.peer_id] if is_shared else self._received[worker]
        buckets: list[tuple[int, Tensor]] = []
        is_difference = False
        if is_shared:
            storage = self._published[version]
            assert isinstance(storage, SharedBuffers), "the slots of rank 0 are those of this server"
            assert storage.slot == command.slot, "the slots of rank 0 are those of this server"
        else:
            buckets, is_difference = self._published.message(command.peer_id, version, command.sends_version)
        task = task_messages.RemoteTask(
            draw=command.draw,
            version=version,
            sends_version=command.sends_version,
            run_s=0.0,
            is_difference=is_difference,
            slot=command.slot,
        )
        self._send(command.peer_id, task, buckets)

    def _map(self, offer: MemoryOffered) -> bool:
        """Map the memory of rank 0, and return whether that is possible."""
        with suppress(OSError):
            self._memory = OfferedShard(offer, self._layout, self._shard)
        return self._memory is not None

    def _allocate(self) -> FlatBuffers:
        """Return storage for a version."""
        if self._memory is not None:
            return self._memory.allocate()
        return self._layout.shard_layouts[self._shard].allocate()

    def _apply(self, command: task_messages.ApplyUpdate) -> None:
        update, published = command.decoded(self._accepted), self._published
        self._accepted = 0
        set_step_options(self._server, command.options)
        version = update.version
        # In place unless a worker reads the newest version (decision 0011).
        storage = published.free_storage() if command.is_read else published[published.newest]
        self._server.apply(update, self._add(version, storage))
        self._rank_0.send(task_messages.UpdateDone(version, self._server.not_finite))

    def _add(self, version: int, storage: FlatBuffers) -> FlatBuffers:
        """Return the storage of a new version, which is kept until rank 0 releases it."""
        self._published.add(version, storage)
        return self._published.acquire(version)

    def _send(
        self,
        peer_id: int,
        message: task_messages.RemoteTask | task_messages.RemoteEvaluateTask,
        buckets: list[tuple[int, Tensor]],
    ) -> None:
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.connection.send(message, buckets)

    def _send_state(self, part: str) -> None:
        state = self._server.shard_state()
        tensors: dict[str, Any] = {}  # copies, so that the next update need not wait
        text = json.dumps(encode(state if part == "state" else state["model"], tensors))
        self._rank_0.send(messages.ShardState(text, part, tensors=tensors))

    def _disconnect(self, peer_id: int) -> None:
        peer = self._peers.pop(peer_id, None)
        self._published.forget(peer_id)
        self._shared.pop(peer_id, None)
        if peer is not None:
            del self._rank_0_ids[peer.peer_id]
            self._acceptor.disconnect(peer.peer_id, GRACE_S)
