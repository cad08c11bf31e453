"""The server of a slice that is not at rank 0: a process that does with its part what rank 0 tells it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

import torch

from paceline.checkpoint.codec import decode, encode
from paceline.clusters.devices import cores
from paceline.clusters.torchrun import Torchrun
from paceline.core.sharding import ShardPeers
from paceline.engines.distributed.parameter_server.published_versions import PublishedVersions
from paceline.engines.distributed.rendezvous.acceptor import Acceptor, News, PeerJoined, PeerLost, PeerMessage
from paceline.engines.distributed.rendezvous.handshake import apply_for
from paceline.engines.distributed.rendezvous.rendezvous import Rendezvous, enter, find
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.messages import (
    AcceptGradient,
    ApplyUpdate,
    AssignTask,
    Evaluating,
    GradientReceived,
    Heartbeat,
    ReleaseVersion,
    RemoteEvaluateTask,
    RemoteTask,
    RemoteTaskDone,
    Sums,
    Updated,
    sums_of,
)
from paceline.engines.distributed.transport.wire_format import WireBuffer, WireFormat
from paceline.errors import RunError
from paceline.jobs.job import Job
from paceline.policies.compensation.base import Compensator
from paceline.server.flat_buffers import FlatLayout
from paceline.server.parameter_server import ParameterServer
from paceline.utils.rank_logger import RankLogger
from paceline.utils.user_code import failure_of
from paceline.worker.torch_utils import build_model

LOG = RankLogger(__name__)

RANK_0 = 0  # as a ticket; all others are drawn from 1 on


def serve_slice(
    job: Job,
    cluster: Torchrun,
    seed: int,
    per_epoch: float | None,
    compensators: Iterable[Compensator],
    agreement: dict[str, Any],
) -> dict[str, Any]:
    """Own a slice until the run of rank 0 ends, and return what rank 0 says of the end.

    Args:
        job: what to train.
        cluster: which slice.
        seed: of the run.
        per_epoch: gradients of one epoch, if the data have a length.
        compensators: that rank 0 may name.
        agreement: what all processes have to agree on.

    Raises:
        UsageError: rank 0 does not agree.
        RunError: rank 0 is gone.
    """
    torch.set_num_threads(max(1, cores() // cluster.ranks.local_world_size))
    number = cluster.slice
    assert number is not None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends everybody
    model = build_model(job, seed)
    layout = FlatLayout(model, cluster.slices, only=number)
    inbox: EventQueue[News] = EventQueue()
    name = f"the server of slice {number} (rank {cluster.ranks.rank}, {socket.gethostname()}, process {os.getpid()})"
    try:
        rank_0 = find(cluster)
        _, line = enter(rank_0, cluster)
        with closing(line):
            apply_for(line, cluster.ranks.token, {"name": name, "worker": cluster.worker, "agreement": agreement})
            match line.receive():
                case {"end": end}:  # another process owns it: its rank was started again, and has started this one too
                    return dict(end)
            server = ParameterServer(job, model, layout, per_epoch, _RankZero(line, inbox), cluster.n)
            server.watch_gradients()
            wires = WireFormat(cluster.wire, layout), WireFormat("float32", layout)
            rooms = [WireBuffer(wires[0], layout.allocate()) for _ in range(cluster.n)]
            meeting = Rendezvous(rank_0._replace(slice=number), cluster.silence_s)
            door = Acceptor(meeting, cluster.ranks.token, agreement, [*rooms, None], inbox)
            threading.Thread(target=_listen, args=(line, inbox), daemon=True).start()
            try:
                return _SliceServer(server, layout, wires, rooms, list(compensators), line).run(inbox, door)
            finally:
                door.close()
    except ConnectionLost as error:
        raise RunError(f"rank 0 is gone: {error}") from error


class _RankZero(ShardPeers):
    """All other slices, through rank 0, which adds up."""

    def __init__(self, line: Connection, inbox: EventQueue[News]) -> None:
        self._line = line
        self._inbox = inbox

    def summed(self, shares: Sequence[float]) -> list[float]:
        self._line.send(sums_of(shares))
        while _asks_for_a_word(news := self._inbox.take(_is_answer_or_end)):
            self._line.send(Heartbeat())
        if not isinstance(news, PeerMessage) or not isinstance(news.message, Sums):
            raise ConnectionLost("it has ended the run")
        return news.message.values


def _asks_for_a_word(news: News) -> bool:
    return isinstance(news, PeerMessage) and isinstance(news.message, Heartbeat)


def _is_answer_or_end(news: News) -> bool:
    if isinstance(news, PeerMessage) and news.ticket == RANK_0:
        return isinstance(news.message, Sums | Heartbeat) or (isinstance(news.message, dict) and "end" in news.message)
    return isinstance(news, PeerLost) and news.ticket == RANK_0


def _listen(line: Connection, inbox: EventQueue[News]) -> None:
    try:
        while True:
            message = line.receive()
            if isinstance(message, ApplyUpdate):
                line.settle()  # rank 0 has heard of the update before
            inbox.put(PeerMessage(RANK_0, message, time.monotonic(), 0.0))
    except ConnectionLost as error:
        inbox.put(PeerLost(RANK_0, str(error)))


class _SliceServer:
    def __init__(
        self,
        server: ParameterServer,
        layout: FlatLayout,
        wires: tuple[WireFormat, WireFormat],
        rooms: list[WireBuffer],
        compensators: list[Compensator],
        rank_0: Connection,
    ) -> None:
        self._server = server
        self._wires = wires  # of workers, and of the process that evaluates
        self._published = PublishedVersions(server, layout, wires[0])
        self._gradients = [room.vectors for room in rooms]
        self._compensators = {repr(each): each for each in compensators}
        self._rank_0 = rank_0
        self._members: dict[int, PeerJoined] = {}  # by ticket at rank 0
        self._known: dict[int, int] = {}  # ticket at rank 0, by ticket here

    def run(self, inbox: EventQueue[News], door: Acceptor) -> dict[str, Any]:
        """Do what rank 0 says, in its order, until it says that the run is over."""
        self._door = door
        while True:
            if inbox.is_empty:
                self._server.accumulate()  # while there is nothing else to do
                self._published.get_ready()
            match inbox.get():
                case PeerMessage(ticket, {"end": end}) if ticket == RANK_0:
                    return dict(end)
                case PeerMessage(ticket, Heartbeat()) if ticket == RANK_0:
                    self._rank_0.send(Heartbeat())
                case PeerMessage(ticket, message) if ticket == RANK_0:
                    self._try(message)
                case PeerLost(ticket, reason) if ticket == RANK_0:
                    raise RunError(f"rank 0 is gone: {reason}")
                case PeerJoined() as entered:
                    self._enter(entered)
                case PeerMessage(ticket, RemoteTaskDone(draw)) if ticket in self._known:
                    self._rank_0.send(GradientReceived(self._known[ticket], draw))
                case PeerLost(ticket, reason) if ticket in self._known:
                    self._rank_0.tell({"parted": self._known[ticket], "reason": reason})

    def _enter(self, entered: PeerJoined) -> None:
        self._members[entered.ticket_at_rank_0] = entered
        self._known[entered.ticket] = entered.ticket_at_rank_0
        self._rank_0.tell({"admitted": entered.ticket_at_rank_0})

    def _try(self, message: object) -> None:
        try:
            self._obey(message)
        except (ConnectionLost, RunError):
            raise
        except Exception as error:
            self._rank_0.tell(failure_of(error))

    def _obey(self, message: object) -> None:
        match message:
            case AssignTask(ticket, draw, version, sends_version):
                self._server.flush()  # of the worker's gradient too: the next one comes to the same place
                work = RemoteTask(draw, version, sends_version, 0.0, None, None, None)
                self._send(ticket, work, self._published.travelling(version) if sends_version else None)
            case Evaluating(ticket, version):
                self._send(ticket, RemoteEvaluateTask(version), self._published[version].memory)
            case AcceptGradient(worker, samples, step_scale):
                self._server.enqueue(self._gradients[worker], samples, step_scale)
            case ApplyUpdate():
                self._apply(message)
            case ReleaseVersion(version):
                self._published.release(version)
            case {"compensate": by, "worker": worker, "version": version, "staleness": staleness, "squared_norm": norm}:
                compensators = [self._compensators[each] for each in by]
                self._server.compensate(
                    compensators, self._gradients[worker], self._published[version], staleness, norm
                )
            case {"wants": what}:
                state = self._server.shard_state()
                self._tell_state(what, state if what == "state" else state["model"])
            case {"dismiss": ticket}:
                self._dismiss(ticket)
            case {"begin": version, "state": state, "tensors": tensors}:
                if state is not None:
                    self._server.load_state_dict(decode(state, tensors))
                self._take_over(version)
            case _:
                LOG.error("unknown message from rank 0: %r", message)

    def _apply(self, command: ApplyUpdate) -> None:
        if command.elsewhere:
            self._published.rebind()
        self._server.apply(command.update)
        self._take_over(command.version)
        self._rank_0.send(Updated(command.version), will_be_answered=True)

    def _take_over(self, version: int) -> None:
        """Keep a version until rank 0 says that nobody reads it any more."""
        self._published.take_over(version)
        self._published.acquire(version)

    def _send(self, ticket: int, message: RemoteTask | RemoteEvaluateTask, part: torch.Tensor | None) -> None:
        member = self._members.get(ticket)
        if member is not None:
            pieces = [(0, part)] if part is not None else None
            member.line.send(message, pieces=pieces, will_be_answered=True)

    def _tell_state(self, what: str, state: dict[str, Any]) -> None:
        tensors: dict[str, torch.Tensor] = {}  # copies: the next update is not waited for
        self._rank_0.tell({"given": what, "state": encode(state, tensors)}, tensors)

    def _dismiss(self, ticket: int) -> None:
        entered = self._members.pop(ticket, None)
        if entered is not None:
            del self._known[entered.ticket]
            self._door.shut(entered.ticket)
