"""What the other processes of a worker do: compute their share of each minibatch, for the first one of their host."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from contextlib import closing
from typing import Any

import torch

from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed.node_worker.leader import LOOPBACK, team_key
from paceline.engines.distributed.node_worker.node_group import NodeGroup, NodeGroupLost
from paceline.engines.distributed.parameter_server.worker_process import LEAVE_S, Ended
from paceline.engines.distributed.rendezvous.handshake import apply_for
from paceline.engines.distributed.rendezvous.rendezvous import LOOK_AGAIN_S, Endpoint, enter, find, reach
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.messages import EndNotice, RemoteTask
from paceline.engines.signals import leaving_on_sigterm
from paceline.errors import RunError
from paceline.jobs.job import Job
from paceline.utils.user_code import failure_of, note_place
from paceline.worker.parameter_guard import check_version
from paceline.worker.replica import Interrupted, Replica
from paceline.worker.task_runner import device_of


def follow(job: Job, cluster: Torchrun, seed: int, agreement: dict[str, Any]) -> Ended:
    """Take part in the work of the first process of this host until the run ends.

    Args:
        job: what to compute.
        cluster: who computes.
        seed: of the run.
        agreement: what the first process has to agree on.

    Raises:
        UsageError: it does not agree, or the job cannot work.
        RunError: it is gone, or the run has failed.
        SystemExit: all processes of this worker were told to end.
    """
    torch.set_num_threads(cluster.worker_threads)
    follower = NodeFollower(job, cluster, seed)
    try:
        with closing(follower.join(agreement)):
            return follower.take_part()
    except ConnectionLost as error:
        raise RunError(f"the first process of worker {cluster.worker} is gone: {error}") from error
    finally:
        follower.close()


class NodeFollower:
    """Process of a node that computes its share of each minibatch, as the leader of the node assigns it."""

    def __init__(self, job: Job, cluster: Torchrun, seed: int) -> None:
        self._cluster = cluster
        uses_nccl = cluster.has_gpu_each(torch.cuda.device_count())
        self._team = NodeGroup(cluster.place, cluster.team_size, lambda: False, uses_nccl=uses_nccl)
        device = device_of(cluster.device, cluster.ranks.local_rank)
        settings: dict[str, Any] = {"device": device, "debug": cluster.debug, "shards": cluster.slices}
        self._replica = Replica(job, seed, cluster.n, group=self._team, **settings)
        self._version = self._replica.layout.allocate()
        self._gradient = self._replica.layout.allocate()
        self._requests: queue.SimpleQueue[RemoteTask | Ended | SystemExit | ConnectionLost] = queue.SimpleQueue()

    def join(self, agreement: dict[str, Any]) -> Connection:
        """Find the first process, be examined by it, and become one of the team.

        Raises:
            UsageError: it wants something else, or has another token.
            RunError: it does not come.
        """
        deadline_s = time.monotonic() + self._cluster.start_timeout_s
        place = self._cluster.place
        where = f"rank {self._cluster.ranks.rank}, {socket.gethostname()}, process {os.getpid()}"
        name = f"process {place} of worker {self._cluster.worker} ({where})"
        hello = {"name": name, "worker": place, "agreement": agreement}
        store = find(self._cluster).client()
        while time.monotonic() < deadline_s:
            address = _told(store, team_key(self._cluster.worker))
            if address is not None and (first := reach(address)):  # else it is that of an earlier one
                try:
                    return self._enter(first, hello)
                except ConnectionLost:
                    pass
            time.sleep(LOOK_AGAIN_S)
        raise RunError(
            f"the first process of worker {self._cluster.worker} could not be reached for start_timeout_s = "
            f"{self._cluster.start_timeout_s:g} s: see what it says"
        )

    def close(self) -> None:
        """Let go of the team."""
        self._replica.close()
        self._team.close()

    def _enter(self, first: Endpoint, hello: dict[str, Any]) -> Connection:
        _, line = enter(first, self._cluster)
        apply_for(line, self._cluster.ranks.token, hello)
        told = line.receive()
        if not isinstance(told, dict) or "team" not in told:
            raise ConnectionLost("what came is no key of a team")
        self._team.connect(first.client(), told["team"], first.device)
        self._line = line
        return line

    def take_part(self) -> Ended:
        """Compute this process's share of everything until the end."""
        threading.Thread(target=self._listen, daemon=True).start()
        with leaving_on_sigterm(self._ask_to_leave):
            while True:
                match self._requests.get():
                    case RemoteTask() as work:
                        self._compute(work)
                    case Ended() as ended:
                        return ended
                    case error:
                        raise error

    def _compute(self, work: RemoteTask) -> None:
        try:
            if work.sends_version:
                self._team.hand_round(self._version)
            who = f"process {self._cluster.place} of worker {self._cluster.worker}"
            check_version(self._version.memory, work.checksum, who, f"before its draw {work.draw}")
            self._replica.gradient(self._cluster.worker, work.draw, work.minibatch, self._version, self._gradient)
        except Interrupted:
            pass
        except NodeGroupLost as error:
            raise ConnectionLost(str(error)) from error
        except Exception as error:
            note_place(error, f"after update {work.version}")
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        """Tell the first process, which tells rank 0, and wait until it has ended the line."""
        self._line.tell(failure_of(error))
        try:
            while not isinstance(self._requests.get(timeout=LEAVE_S), ConnectionLost):
                pass
        except queue.Empty:
            pass

    def _listen(self) -> None:
        """Hear what the first process says while the main thread computes."""
        try:
            while True:
                match self._line.receive():
                    case RemoteTask() as work:
                        self._requests.put(work)
                    case EndNotice():
                        last = self._replica.layout.allocate()
                        self._line.receive_into(last.memory)
                        text = self._line.receive()
                        assert isinstance(text, dict)
                        self._requests.put(Ended(last, text["end"]))
                        return
                    case {"leave": status}:
                        self._requests.put(SystemExit(status))
                        return
        except ConnectionLost as error:
            self._requests.put(error)
            self._team.abort()

    def _ask_to_leave(self) -> None:
        # A thread of its own: the main one may hold the line just now.
        threading.Thread(target=self._line.tell, args=({"leaves": "SIGTERM"},), daemon=True).start()


def _told(store: Any, key: str) -> tuple[str, int] | None:
    """Return where the first process listens, as far as it has said."""
    return (LOOPBACK, int(store.get(key))) if store.check([key]) else None
