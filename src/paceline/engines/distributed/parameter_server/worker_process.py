"""What every other process of a job does: compute gradients, or evaluate, for rank 0 until the run ends."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed.node_worker.leader import LeadingReplica, NodeLeader
from paceline.engines.distributed.node_worker.node_group import NodeGroupLost
from paceline.engines.distributed.parameter_server.shard_channel import ShardChannel, strands
from paceline.engines.distributed.rendezvous.handshake import RunOver, apply_for
from paceline.engines.distributed.rendezvous.rendezvous import enter, find
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.messages import (
    EndNotice,
    Interrupting,
    RemoteEvaluateTask,
    RemoteTask,
    RemoteTaskDone,
)
from paceline.engines.signals import leaving_on_sigterm
from paceline.errors import RunError, UsageError
from paceline.jobs.job import Job
from paceline.server.flat_buffers import FlatBuffers
from paceline.utils.rank_logger import RankLogger
from paceline.utils.user_code import failure_of, note_place
from paceline.worker.parameter_guard import check_version
from paceline.worker.replica import GradientStats, Interrupted, Replica
from paceline.worker.task_runner import TaskRunner, device_of, pin

LOG = RankLogger(__name__)

ALL_DRAWS = sys.maxsize
LEAVE_S = 10.0


class Ended(NamedTuple):
    """The run is over.

    Attributes:
        parameters: and buffers, as they were at the end.
        end: what rank 0 says of it.
    """

    parameters: FlatBuffers
    end: dict[str, Any]


class _Leave(NamedTuple):
    """SIGTERM has come."""

    reason: str


class _Gone(NamedTuple):
    """Rank 0 does not answer any more."""

    reason: str


def serve(job: Job, cluster: Torchrun, seed: int, agreement: dict[str, Any]) -> Ended:
    """Take part in the run of rank 0 until it ends.

    Args:
        job: what to compute.
        cluster: who computes.
        seed: of the run.
        agreement: what rank 0 has to agree on.

    Raises:
        UsageError: rank 0 does not agree, or the job cannot work.
        RunError: rank 0 is gone, or its run has failed.
        RunOver: the run ended before this process took part.
        SystemExit: this process was told to end, and has handed in what it had.
    """
    torch.set_num_threads(cluster.worker_threads)
    member = WorkerProcess(job, cluster, seed)
    name = f"worker {cluster.worker} (rank {cluster.ranks.rank}, {socket.gethostname()}, process {os.getpid()})"
    hello = {"name": name, "worker": cluster.worker, "agreement": agreement}
    try:
        rank_0 = find(cluster)
        member.leader.gather(rank_0, agreement)
        with ExitStack() as open_lines:
            lines: list[Connection] = []
            for number in range(cluster.slices):
                ticket, line = enter(rank_0._replace(slice=number), cluster)
                lines.append(open_lines.enter_context(closing(line)))
                hello.setdefault("ticket", ticket)  # by which rank 0, the first one, knows this process
                apply_for(line, cluster.ranks.token, hello)
            ended = member.take_part(lines)
            member.leader.end(ended.parameters, ended.end)
            return ended
    except ConnectionLost as error:
        raise RunError(f"rank 0 is gone: {error}") from error
    finally:
        member.leader.close()
        member.close()


class WorkerProcess:
    """Rank that computes gradients for the server of rank 0."""

    def __init__(self, job: Job, cluster: Torchrun, seed: int) -> None:
        self._worker = cluster.worker
        self._leaving_status = cluster.leaving_status
        device = device_of(cluster.device, cluster.ranks.local_rank)
        is_worker = self._worker < cluster.n
        self.leader = NodeLeader(cluster, self._is_unwanted, self._leave, self._break_up)
        settings: dict[str, Any] = {"device": device, "debug": cluster.debug, "shards": cluster.slices}
        self._replica: Replica
        if self.leader.team.size > 1:
            self._replica = LeadingReplica(job, seed, cluster.n, leader=self.leader, **settings)
        else:
            check = self._check if is_worker else None
            self._replica = Replica(job, seed, cluster.n, check=check, **settings)
            self._replica.on_gradient_ready = self._accumulated
        faults = tuple(cluster.faults)
        self._task_runner = TaskRunner(self._replica, self._worker, cluster.slowness, seed, faults, self._sleep)
        self._version = self._replica.layout.allocate()
        self._gradient = self._replica.layout.allocate()
        word = cluster.wire if is_worker else "float32"  # what is measured is exact
        self._strands = strands(self._replica, word, self._version, self._gradient)
        self._owners = [strand for strand in self._strands for _ in strand.parameters]
        if cluster.device == "cuda":
            pin(self._version)
            pin(self._gradient)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()  # also safe in a handler of signals
        self._draw = 0
        self._received_s = 0.0  # when the work came
        self._interrupted = 0  # the newest draw that is to be abandoned
        self._nudge = threading.Event()  # wakes who sleeps
        self._given: dict[
            ShardChannel, RemoteTask | RemoteEvaluateTask
        ] = {}  # of a request, until every server has made it
        self._lock = threading.Lock()
        self._listeners: list[threading.Thread] = []

    def take_part(self, lines: list[Connection]) -> Ended:
        """Answer every request until the end.

        Args:
            lines: to the server of each slice, the first one at rank 0.
        """
        for strand, line in zip(self._strands, lines, strict=True):
            strand.use(line)
        self._line = lines[0]
        self._listeners = [threading.Thread(target=self._listen, daemon=True)]
        self._listeners += [
            threading.Thread(target=self._listen_to_slice, args=[strand], daemon=True) for strand in self._strands[1:]
        ]
        for listener in self._listeners:
            listener.start()
        with leaving_on_sigterm(partial(self._leave, "SIGTERM")):
            while True:
                request = self._requests.get()
                if isinstance(request, Ended):
                    return request
                try:
                    self._answer(request)
                except (ConnectionLost, RunOver, SystemExit):
                    raise
                except NodeGroupLost as error:
                    raise self._failed_together() from error
                except Exception as error:
                    self._fail(error)
                    raise

    def close(self) -> None:
        """Wait for the threads, when the line is at its end."""
        self._replica.close()
        for strand in self._strands:
            strand.close()
        self.join()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the threads that listen, when the line is at its end."""
        for listener in self._listeners:
            listener.join(timeout_s)

    def _answer(self, request: Any) -> None:
        match request:
            case RemoteTask(), received_s:
                self._compute(request[0], received_s)
            case RemoteEvaluateTask(version), _:
                metrics = self._replica.evaluate(self._version)
                self._line.tell({"metrics": metrics, "version": version}, will_be_answered=True)
            case _Leave(reason):
                LOG.warning("worker %d leaves the run: %s", self._worker, reason)
                self.leader.dismiss({"leave": self._leaving_status})
                self._take_leave({"leaves": reason})
                raise SystemExit(self._leaving_status)
            case _Gone(reason):
                raise RunError(f"rank 0 is gone: {reason}")
            case NodeGroupLost() | RunOver():
                raise request

    def _compute(self, work: RemoteTask, received_s: float) -> None:
        self._draw, self._received_s = work.draw, received_s
        for strand in self._strands:
            strand.begin(work.draw)
        self.leader.expect(work)
        self._check_version(work, "before")
        try:
            measured = self._task_runner.gradient(work.draw, work.minibatch, work.run_s, self._version, self._gradient)
        except Interrupted:
            for strand in self._strands:
                strand.abandon()
        except Exception as error:
            note_place(error, f"after update {work.version}")
            raise
        else:
            self._check_version(work, "after")
            self._hand_in(measured)

    def _accumulated(self, parameter: int) -> None:
        self._owners[parameter].accumulated(parameter, self._busy_s)

    def _hand_in(self, measured: GradientStats) -> None:
        """Send what of the gradient has not gone yet, and its scalars."""
        for strand in self._strands:
            strand.pack_rest()
        overflows = any(strand.overflows(measured.squared_norm) for strand in self._strands)
        finished = RemoteTaskDone(
            self._draw, 0, self._busy_s, *measured._replace(finite=measured.finite and not overflows)
        )
        for strand in self._strands:
            strand.hand_in(finished)

    @property
    def _busy_s(self) -> float:
        return time.monotonic() - self._received_s

    def _check_version(self, work: RemoteTask, when: str) -> None:
        """Compare what is computed with to what the server has sent, in debug mode."""
        if work.checksum is not None:
            at = f"{when} its draw {work.draw}, of version {work.version}"
            check_version(self._strands[0].travelling(), work.checksum, f"worker {self._worker}", at)

    def _is_unwanted(self) -> bool:
        return self._interrupted >= self._draw

    def _check(self) -> None:
        if self._is_unwanted():
            raise Interrupted

    def _sleep(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self._check()
            self._nudge.wait(left_s)
            self._nudge.clear()
        self._check()

    def _listen(self) -> None:
        """Receive requests; only an interrupt comes while the main thread works, so the version is its alone then."""
        try:
            while True:
                match self._line.receive():
                    case RemoteTask() | RemoteEvaluateTask() as request:
                        self._receive_part(self._strands[0], request)
                    case Interrupting(draw):
                        self._abandon(draw)
                    case {"end": end}:
                        self._requests.put(RunOver(end))
                        return
                    case EndNotice():
                        last = self._replica.layout.allocate()
                        self._line.receive_into(last.memory)
                        self._requests.put(Ended(last, self._reason()))
                        self._abandon(ALL_DRAWS)
                        return
        except ConnectionLost as error:
            self._requests.put(_Gone(str(error)))
            self._abandon(ALL_DRAWS)

    def _listen_to_slice(self, strand: ShardChannel) -> None:
        """Receive the parts of versions that another server than rank 0 sends; if it is gone, rank 0 will say so."""
        with suppress(ConnectionLost):
            while True:
                request = strand.line.receive()
                if isinstance(request, RemoteTask | RemoteEvaluateTask):
                    self._receive_part(strand, request)

    def _receive_part(self, strand: ShardChannel, request: RemoteTask | RemoteEvaluateTask) -> None:
        """Receive a part of what a request needs, which is asked for by every server and begun with the last part."""
        strand.line.settle()
        if isinstance(request, RemoteEvaluateTask) or request.sends_version:
            strand.receive_version()
        with self._lock:
            self._given[strand] = request
            if len(self._given) < len(self._strands):
                return
            given, self._given = self._given, {}
        asked = given[self._strands[0]]  # which says all there is to say
        assert all(each[:1] == asked[:1] for each in given.values()), given  # no server is ahead of another
        self._requests.put((asked, time.monotonic()))

    def _reason(self) -> dict[str, Any]:
        text = self._line.receive()
        assert isinstance(text, dict)
        end: dict[str, Any] = text["end"]
        return end

    def _abandon(self, draw: int) -> None:
        self._interrupted = draw
        self._nudge.set()

    def _leave(self, reason: str) -> None:
        self._requests.put(_Leave(reason))

    def _break_up(self) -> None:
        self._requests.put(NodeGroupLost("a process of this worker is gone"))
        self._abandon(ALL_DRAWS)

    def _failed_together(self) -> UsageError | RunError:
        """Tell rank 0 what has become of another process of this worker."""
        text = self.leader.last_word()
        self._take_leave(text)
        kind = UsageError if text.get("is_usage") else RunError
        return kind(str(text.get("failed", text.get("leaves"))))

    def _fail(self, error: Exception) -> None:
        """Tell rank 0 what has gone wrong here."""
        self._take_leave(failure_of(error))

    def _take_leave(self, text: dict[str, Any]) -> None:
        """Say a last word, and wait until rank 0 has heard it and ends the line."""
        self._line.tell(text)
        self._listeners[0].join(LEAVE_S)
