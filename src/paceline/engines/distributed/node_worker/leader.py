"""Leader of a node worker: forwards the tasks of rank 0 to the other processes of its host."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from msgspec.structs import replace

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import Compute, Minibatch
from paceline.engines.distributed.node_worker.node_group import LOOPBACK, NodeGroup
from paceline.engines.distributed.rendezvous.acceptor import GRACE_S, AcceptedPeer, Acceptor
from paceline.engines.distributed.rendezvous.first_workers import await_peers
from paceline.engines.distributed.rendezvous.handshake import RunFinished
from paceline.engines.distributed.rendezvous.rendezvous import find_rank_0
from paceline.engines.distributed.rendezvous.session import FinalState
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.sum_messages import StoreKey
from paceline.engines.distributed.transport.task_messages import RemoteTask
from paceline.engines.distributed.transport.transport import Transport
from paceline.errors import UsageError
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.utils.rank_logger import RankLogger
from paceline.worker.parameter_guard import checksum

LOG = RankLogger(__name__)
LOSS_REPORT_S = 1.0  # until the acceptor has reported why a process is gone


class NodeLeader:
    """Connections of a node's leader to the other processes of the node; none if it has no others.

    The methods `on_join` to `fail` are the callbacks of the acceptor, in the thread of the sockets.

    Args:
        cluster: launch settings of this process.
        transport: transport to the other processes.
        is_cancelled: returns whether the current task was cancelled.
        leave: callback, from another thread, with the reason why a process of the node was asked to end.
        on_lost: callback, from another thread, when a process of the node has failed or is gone; see `loss`.
        makes_local_steps: whether the leader changes the version before each gradient, by its own steps.

    Attributes:
        group: process group of the node.
    """

    def __init__(
        self,
        cluster: Torchrun,
        transport: Transport,
        is_cancelled: Callable[[], bool],
        leave: Callable[[str], None],
        on_lost: Callable[[], None],
        *,
        makes_local_steps: bool = False,
    ) -> None:
        self._cluster = cluster
        self._transport = transport
        self._leave = leave
        self._on_lost = on_lost
        self._makes_local_steps = makes_local_steps
        self._loss: messages.Leave | messages.Failed = messages.Leave("a process of its host is gone")
        self._is_loss_known = threading.Event()
        self._lock = threading.Condition()
        self._peers: dict[int, AcceptedPeer] = {}  # by local rank
        self._store = GroupStore(0, self._relay)
        self._error: Exception | None = None  # while the processes join
        self._acceptor: Acceptor | None = None
        self._has_gathered = False
        self._is_over = False
        self._has_sent_version = False
        uses_nccl = cluster.has_gpu_each(torch.cuda.device_count())
        self.group = NodeGroup(cluster.rank_in_node, cluster.node_size, is_cancelled, self.forward, uses_nccl=uses_nccl)

    def gather(self, job_spec: dict[str, Any]) -> None:
        """Publish the port of this process at rank 0, and wait until all processes of the node have joined.

        Raises:
            UsageError: a process has another job.
            RunError: a process did not join.
            RunFinished: the run has ended.
        """
        if self.group.size == 1:
            return
        self._listen(job_spec)
        await_peers(self._missing, self._wait, self._cluster.start_timeout_s)
        key = secrets.token_hex(32)  # a stranger that finds the sockets of gloo cannot join the group
        with self._lock:  # before the keys of the others
            for peer in self._peers.values():
                peer.connection.send(messages.FormNodeGroup(key))
        self.group.connect(self._transport, self._store, key)

    def _listen(self, job_spec: dict[str, Any]) -> None:
        """Listen on a free port, and publish it at rank 0 on a connection of its own.

        The connection is made first, because it proves the token with which this process listens.
        """
        worker = self._cluster.worker
        with closing(find_rank_0(self._cluster, self._transport, self._transport.connect)) as rank_0:
            self._acceptor = Acceptor(
                transport=self._transport,
                host=LOOPBACK,
                port=0,
                job_spec=job_spec,
                processes=self.group.size,
                handler=self,
            )
            rank_0.send(messages.LeaderListens(worker, self._acceptor.address[1]))
            leader_port(rank_0, worker, self._cluster.start_timeout_s)  # the answer shows that the port has arrived

    def _missing(self) -> str:
        with self._lock:
            if self._error is not None:
                raise self._error
            missing = [str(rank) for rank in range(1, self.group.size) if rank not in self._peers]
            self._has_gathered = not missing
        processes = f"process{'es' if len(missing) > 1 else ''} {', '.join(missing)}"
        return f"{processes} of worker {self._cluster.worker}" if missing else ""

    def _wait(self) -> None:
        with self._lock:
            self._lock.wait(self._transport.poll_s)

    # --- callbacks of the acceptor ------------------------------------------------------------------------

    def on_join(self, peer: AcceptedPeer) -> None:
        """Add a process of the node."""
        with self._lock:
            self._peers[peer.worker] = peer
            self._lock.notify_all()

    def on_message(self, peer: AcceptedPeer, message: Message, at_s: float, contents_s: float) -> None:
        """Handle a key of the group, or the last message of a process."""
        match message:
            case StoreKey():
                self._store.put(message)
                self._relay(message, peer.worker)
            case messages.Leave(reason):
                self._leave(reason)
            case messages.Failed():
                self._lose(message)

    def on_leave(self, peer: AcceptedPeer, reason: str) -> None:
        """Handle the loss of a process, which ends this worker; while processes join, another one may replace it."""
        with self._lock:
            if not self._has_gathered:
                self._peers.pop(peer.worker, None)
                return
        self._lose(messages.Leave(f"a process of its host is gone: {reason}"))

    def on_reject(self, reason: str) -> None:
        """Handle a process with another job."""
        self.fail(UsageError(reason))

    def fail(self, error: Exception) -> None:
        """Handle an error while processes join; later, log it."""
        with self._lock:
            if not self._has_gathered:
                self._error = error
                self._lock.notify_all()
                return
        LOG.warning("rejected a process: %s", error)

    def _relay(self, key: StoreKey, sender: int = 0) -> None:
        """Send a key of the group's store to all processes but the one that has set it."""
        with self._lock:
            for local_rank, peer in self._peers.items():
                if local_rank != sender:
                    peer.connection.send(key)

    def _lose(self, loss: messages.Leave | messages.Failed) -> None:
        if not self._is_over:
            self._is_over = True
            self._loss = loss
            self._is_loss_known.set()
            self._on_lost()
            self.group.abort()

    def loss(self) -> messages.Leave | messages.Failed:
        """Return the message for rank 0 after the loss of a process, which may be known a moment later."""
        self._is_loss_known.wait(LOSS_REPORT_S)
        return self._loss

    # --- tasks --------------------------------------------------------------------------------------------

    def on_change(self) -> None:
        """Record that the version has changed since it was broadcast."""
        self._has_sent_version = False

    def forward(self, draw: int, minibatch: Minibatch | None, version: FlatBuffers) -> None:
        """Let the other processes compute their shares of a minibatch at a version."""
        command = Compute(worker=self._cluster.worker, version=0, draw=draw, minibatch=minibatch)
        is_new = self._makes_local_steps or not self._has_sent_version
        task = RemoteTask.of(command, sends_version=is_new, run_s=0.0)
        if self._cluster.debug:
            task = replace(task, checksum=checksum(version.memory))
        for peer in self._peers.values():
            peer.connection.send(task)
        if self._peers and is_new:
            self.group.broadcast(version)
        self._has_sent_version = True

    # --- end ----------------------------------------------------------------------------------------------

    def shut_down(self, message: messages.Shutdown) -> None:
        """End the other processes with this exit status, and wait until they have gone."""
        self._is_over = True
        for peer in self._peers.values():
            peer.connection.send(message)
        self._join()

    def finish(self, final: FinalState) -> None:
        """Send the final state to the other processes, and wait until they have gone."""
        self._is_over = True
        for peer in self._peers.values():
            peer.connection.send(final.end.with_parameters(final.parameters.memory))
        self._join()

    def close(self) -> None:
        """Close all connections and the group."""
        self._is_over = True
        self.group.close()
        if self._acceptor is not None:
            self._acceptor.close()

    def _join(self) -> None:
        if self._acceptor is not None:
            self._acceptor.join([peer.peer_id for peer in self._peers.values()], GRACE_S)


def leader_port(rank_0: Connection, worker: int, timeout_s: float) -> int | None:
    """Return the port on which the leader of a worker's node listens; None if it is not published yet.

    Args:
        rank_0: connection to rank 0 over which this process has not joined.
        worker: number of the worker.
        timeout_s: longest wait for the answer in seconds.

    Raises:
        ConnectionLost: rank 0 has ended, or does not answer.
        RunFinished: the run has ended.
    """
    rank_0.send(messages.FindLeader(worker))
    match rank_0.recv(timeout_s):
        case messages.LeaderPort(port):
            return port
        case messages.End() as end:
            raise RunFinished(end)
        case message:
            raise ConnectionLost(f"it has sent {type(message).__name__} to a question for a port")
