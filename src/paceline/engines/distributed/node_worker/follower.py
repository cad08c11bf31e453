"""Follower of a node worker: computes its share of each minibatch for the leader of its host."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import closing, suppress
from typing import Any

import torch

from paceline.engines.distributed.node_worker.leader import leader_port
from paceline.engines.distributed.node_worker.node_group import LOOPBACK, NodeGroup, NodeGroupLost
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.rendezvous import find_rank_0
from paceline.engines.distributed.rendezvous.session import (
    ClientSession,
    FinalState,
    describe_process,
    final_state,
    raising_run_error,
)
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.sum_messages import StoreKey
from paceline.engines.distributed.transport.task_messages import RemoteTask
from paceline.engines.distributed.transport.transport import Address
from paceline.engines.notice_watch import NoticeWatch
from paceline.errors import RunError
from paceline.utils.user_code import note_place
from paceline.worker.gradient_source import Interrupted
from paceline.worker.parameter_guard import check_version

Request = RemoteTask | FinalState | SystemExit | Exception


def follow(rank: Rank, job_spec: dict[str, Any]) -> FinalState:
    """Take part in the tasks of the leader of this host until the run ends.

    Args:
        rank: settings of this process.
        job_spec: settings that must be equal on all processes.

    Raises:
        UsageError: the leader rejects this process, or the job cannot work.
        RunError: the leader is gone, or the run has failed.
        RunFinished: the run ended before this process took part.
        SystemExit: all processes of this worker were asked to end.
    """
    rank.host.lifecycle.set_num_threads(rank.cluster.worker_threads)
    follower = NodeFollower(rank)
    try:
        with raising_run_error(follower.leader_name), closing(follower.join(job_spec)):
            return follower.run()
    finally:
        follower.close()


class NodeFollower:
    """Process of a node that computes its share of each minibatch."""

    def __init__(self, rank: Rank) -> None:
        self._cluster = cluster = rank.cluster
        self._transport = rank.transport
        self._lifecycle = rank.host.lifecycle
        uses_nccl = cluster.has_gpu_each(torch.cuda.device_count())
        # A task is cancelled at the leader alone; the group's next sum passes that on (decision 0013).
        self._group = NodeGroup(cluster.rank_in_node, cluster.node_size, lambda: False, uses_nccl=uses_nccl)
        settings: dict[str, Any] = {"device": rank.device, "debug": cluster.debug, "shards": cluster.shards}
        self._replica = rank.host.make_replica(rank.job, rank.seed, cluster.n, group=self._group, **settings)
        self._replica.is_bound_to_server = rank.plan.local_steps is None
        self._version = self._replica.layout.allocate()
        self._gradient = self._replica.layout.allocate()
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._name = f"process {cluster.rank_in_node} of worker {cluster.worker}"
        self.leader_name = f"the first process of worker {cluster.worker}"

    def join(self, job_spec: dict[str, Any]) -> ClientSession:
        """Find the leader of this host, and join its group.

        Raises:
            UsageError: the leader rejects this process.
            RunError: the leader cannot be reached.
            RunFinished: the run has ended.
        """
        timeout_s = self._cluster.start_timeout_s
        deadline_s = time.monotonic() + timeout_s
        connection = find_rank_0(self._cluster, self._transport, self._transport.connect)
        with raising_run_error(), closing(connection) as rank_0:
            while time.monotonic() < deadline_s:
                port = leader_port(rank_0, self._cluster.worker, timeout_s)
                if port is not None:
                    with suppress(ConnectionLost):  # the port may be that of an earlier leader
                        return self._join((LOOPBACK, port), job_spec)
                time.sleep(self._transport.poll_s)
        raise RunError(f"{self.leader_name} could not be reached within start_timeout_s={timeout_s:g}: check its log")

    def close(self) -> None:
        """Close the group."""
        self._replica.close()
        self._group.close()

    def _join(self, leader: Address, job_spec: dict[str, Any]) -> ClientSession:
        hello = messages.Hello.of(describe_process(self._name, self._cluster), self._cluster.rank_in_node, job_spec)
        session = ClientSession.connect(self._transport, leader, hello, self.leader_name)
        message = session.connection.recv()
        if not isinstance(message, messages.FormNodeGroup):
            session.close()
            raise ConnectionLost(f"expected FormNodeGroup, received {type(message).__name__}")
        self._session = session
        self._store = GroupStore(0, session.connection.send)
        session.listen(self._on_message, self._on_error)  # which receives the keys that the group connects with
        self._group.connect(self._transport, self._store, message.key)
        return session

    def run(self) -> FinalState:
        """Compute this process's share of all minibatches until the end of the run."""
        leave = self._request_leave
        with self._lifecycle.leaving_on_sigterm(leave), NoticeWatch(self._cluster.notice, leave):
            while True:
                match self._requests.get():
                    case RemoteTask() as task:
                        self._compute(task)
                    case FinalState() as final:
                        return final
                    case error:
                        raise error

    def _compute(self, task: RemoteTask) -> None:
        try:
            if task.sends_version:
                self._group.broadcast(self._version)
            check_version(self._version.memory, task.checksum, self._name, f"before its draw {task.draw}")
            minibatch, _ = task.minibatches(self._cluster.n, ahead=0)
            self._replica.gradient(self._cluster.worker, task.draw, minibatch, self._version, self._gradient)
        except Interrupted:
            pass
        except NodeGroupLost as error:
            raise ConnectionLost(str(error)) from error
        except Exception as error:
            note_place(error, f"after update {task.version}")
            self._session.fail(error)  # the leader reports it to rank 0
            raise

    def _on_message(self, message: Message) -> None:
        match message:
            case StoreKey():
                self._store.put(message)
            case RemoteTask():
                self._requests.put(message)
            case messages.End() as end:
                self._requests.put(final_state(end, self._replica.layout))
            case messages.Shutdown(status):
                self._requests.put(SystemExit(status))

    def _on_error(self, error: Exception) -> None:
        self._requests.put(error)
        self._group.abort()

    def _request_leave(self, reason: str) -> None:
        # In a thread of its own: the main thread may hold the lock of the connection.
        threading.Thread(target=self._session.connection.send, args=(messages.Leave(reason),), daemon=True).start()
