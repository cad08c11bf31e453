"""Runs the workers of other processes, on any host, and reports what they do."""

from __future__ import annotations

import logging
import selectors
import threading
import time
from math import inf
from typing import Any

import torch

from paceline.clusters.devices import cores
from paceline.clusters.torchrun import Torchrun
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import (
    AbortRun,
    Accept,
    Apply,
    Arrival,
    Compute,
    EndRun,
    Evaluate,
    Evaluated,
    Event,
    Interrupt,
    Joined,
    Outcome,
    RestartWorker,
)
from paceline.engines.base import Observer, will_be_compensated
from paceline.engines.distributed.parameter_server.heartbeat import HeartbeatMonitor
from paceline.engines.distributed.parameter_server.link_utilization import LinkMonitor
from paceline.engines.distributed.parameter_server.published_versions import PublishedVersions
from paceline.engines.distributed.parameter_server.remote_worker import Arriving, RemoteWorker
from paceline.engines.distributed.parameter_server.shard_clients import ShardClients
from paceline.engines.distributed.rendezvous.acceptor import (
    GRACE_S,
    Acceptor,
    AllWorkersLost,
    News,
    PeerJoined,
    PeerLost,
    PeerMessage,
    PeerRejected,
)
from paceline.engines.distributed.rendezvous.rendezvous import call
from paceline.engines.distributed.rendezvous.sidecar import SidecarProcess
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.messages import (
    AcceptGradient,
    AssignTask,
    EndNotice,
    Evaluating,
    GradientReceived,
    Interrupting,
    ReleaseVersion,
    RemoteEvaluateTask,
    RemoteTask,
    RemoteTaskCancelled,
    RemoteTaskDone,
)
from paceline.engines.distributed.transport.wire_format import WireBuffer, WireFormat
from paceline.engines.wall_clock import WallClockEngine
from paceline.errors import RunError, UsageError, describe_error
from paceline.jobs.job import Job
from paceline.server.flat_buffers import FlatLayout, flat_copy
from paceline.server.parameter_server import ParameterServer
from paceline.utils.rank_logger import RankLogger
from paceline.worker.parameter_guard import checksum

LOG = RankLogger(__name__)

SLOWEST_BYTES_PER_S = 50e6  # at which the parameters are sent to all workers at the end


class DistributedServerEngine(WallClockEngine[RemoteWorker]):
    """Coordinator and server in this process, rank 0, and workers in others.

    Args:
        job: what to train.
        cluster: where to listen.
        server: owns the parameters, or the first slice.
        layout: of what it owns.
        slices: the servers of the others.
        agreement: what every process has to agree on.
    """

    def __init__(
        self,
        job: Job,
        cluster: Torchrun,
        server: ParameterServer,
        layout: FlatLayout,
        slices: ShardClients,
        agreement: dict[str, Any],
    ) -> None:
        self._needs_evaluator = job.eval_data is not None
        self._wire = WireFormat(cluster.wire, layout)
        self._published = PublishedVersions(server, layout, self._wire, self._forget)
        self._survey = LinkMonitor(cluster.n, _nbytes_of_slices(cluster, server), cluster.bytes_per_s)
        super().__init__(server, self._published, [layout.allocate() for _ in range(cluster.n)], debug=cluster.debug)
        self._cluster = cluster
        self._slices = slices
        self._agreement = agreement
        self._inbox: EventQueue[News] = EventQueue()
        slices.inbox = self._inbox
        self._door: Acceptor | None = None
        self._pulse: HeartbeatMonitor | None = None
        self._members: dict[int, RemoteWorker] = {}  # by ticket
        self._joined = 0  # workers so far
        self._evaluator: RemoteWorker | None = None
        self._assistants: list[SidecarProcess] = []
        self._patience: list[threading.Timer] = []  # with a run that has no worker left
        self._end: dict[str, Any] = {}

    def _start(self) -> None:
        torch.set_num_threads(max(1, cores() // self._cluster.ranks.local_world_size))
        meeting = call(self._cluster)
        rooms: list[WireBuffer | None] = [WireBuffer(self._wire, gradient) for gradient in self._gradients]
        rooms += [None] * self._cluster.slices  # for the process that evaluates, and for the servers of other slices
        self._door = Acceptor(meeting, self._cluster.ranks.token, self._agreement, rooms, self._inbox)
        if self._cluster.has_worker_at_server:
            self._assistants.append(SidecarProcess(0))
        if self._needs_evaluator:
            self._assistants.append(SidecarProcess(self._cluster.n))
        self._selector.register(self._inbox, selectors.EVENT_READ)
        self._await_everybody()
        self._slices.begin(self._first_version)
        self._events.clear()  # they were there from the beginning

    def _await_everybody(self) -> None:
        deadline_s = time.monotonic() + self._cluster.start_timeout_s
        while missing := self._missing():
            if self.signals.caught and not self._slices.missing:
                return
            for key, _ in self._selector.select(timeout=0.2):
                self._read(key)
            for assistant in self._assistants:
                assistant.check()
            if time.monotonic() > deadline_s:
                raise RunError(
                    f"{' and '.join(missing)} did not come within start_timeout_s = "
                    f"{self._cluster.start_timeout_s:g} s: see what its rank says"
                )

    def _missing(self) -> list[str]:
        """Return who is needed and not there."""
        if self._slices.missing:
            return [f"the server of slice {', '.join(map(str, self._slices.missing))}"]
        there = [member.worker for member in self._members.values() if member.is_ready]
        needed = range(self._cluster.n + self._needs_evaluator)
        missing = [str(worker) for worker in needed if worker not in there]
        return [f"worker {', '.join(missing)}"] if missing else []

    def _close(self, error: BaseException | None) -> None:
        if self._pulse is not None:
            self._pulse.stop()
        for assistant in self._assistants[self._cluster.has_worker_at_server :]:
            assistant.kill()  # nobody waits for an evaluation any more
        if self._door is not None:
            self._take_leave(
                {"error": describe_error(error), "is_usage": isinstance(error, UsageError)} if error else self._end
            )
        for timer in self._patience:
            timer.cancel()
            timer.join()
        if self._door is None or self._door.close():
            self._inbox.close()
        for assistant in self._assistants:
            assistant.end()
        self._members.clear()
        self._workers.clear()
        self._evaluator = self._door = self._pulse = None  # and with the lines and the store the ports are free again
        self._selector.close()

    def _take_leave(self, end: dict[str, Any]) -> None:
        """Send every worker the parameters and why the run ended, and wait until they are sent."""
        assert self._door is not None
        self._door.announce_end(end)
        late = self._late()
        for newcomer in late:
            newcomer.line.tell({"end": end})
        last = flat_copy(self._server.model, self._cluster.slices).memory
        for member in self._members.values():
            member.line.send(EndNotice(self._versions.newest), [last])
            member.line.tell({"end": end})
        self._slices.tell({"end": end})
        tickets = [*self._members, *self._slices.tickets, *(newcomer.ticket for newcomer in late)]
        self._door.wait(tickets, GRACE_S + len(tickets) * last.nbytes / SLOWEST_BYTES_PER_S)

    def _late(self) -> list[PeerJoined]:
        """Return the processes that were admitted and that this engine has not read from its inbox."""
        news = []
        while not self._inbox.is_empty:
            news.append(self._inbox.get())
        return [each for each in news if isinstance(each, PeerJoined)]

    def run(self, coordinator: Coordinator, observe: Observer | None = None, first: Event | None = None) -> EndRun:
        """Run to the end and return what ended it, which the workers are told too."""
        assert self._door is not None
        self._pulse = HeartbeatMonitor(
            self._slices.lines, self._door, self._inbox, lambda: self._patience_s(coordinator)
        )
        stop = super().run(coordinator, observe, first)
        self._tell_load(self._survey.tell_at_last())
        self._server.gather_shards()
        self._end = {"outcome": stop.outcome.value, "reason": stop.reason, "time_s": self.now}
        return stop

    def _patience_s(self, coordinator: Coordinator) -> float:
        patience_s = coordinator.worker_timeout_s
        return patience_s if patience_s < inf else self._cluster.start_timeout_s

    # --- commands -----------------------------------------------------------------------------------------

    def apply(self, command: Apply) -> None:
        """Make the update, elsewhere if the version before is still read, and publish it where it is made."""
        elsewhere = self._published.reserve()
        self._slices.apply(command, elsewhere)
        super().apply(command)

    def _get_ready(self) -> None:
        self._published.get_ready()

    def accept(self, command: Accept) -> None:
        """Take the gradient, in all its parts, where they have come."""
        self._slices.send(AcceptGradient(command.worker, command.samples, command.step_scale))
        super().accept(command)

    def _compensated(self, arrival: Arrival) -> Arrival:
        version = self._read_by.get((arrival.worker, arrival.draw))
        if version is not None and will_be_compensated(arrival, self._coordinator):
            self._slices.compensate(arrival, self._coordinator, version)
        return super()._compensated(arrival)

    def _forget(self, version: int) -> None:
        self._slices.send(ReleaseVersion(version))

    def _publish(self, version: int) -> None:
        self._published.take_over(version)

    def _send(self, peer: RemoteWorker, command: Compute) -> None:
        minibatch = command.minibatch or (None, None, None)
        sends_version = peer.holds != command.version
        work = RemoteTask(command.draw, command.version, sends_version, self._elapsed_s(), *minibatch)
        if self._cluster.debug:
            work = work._replace(checksum=checksum(self._published.travelling(command.version)))
        peer.holds = command.version
        peer.sent_s = time.monotonic()
        self._slices.send(AssignTask(peer.ticket, command.draw, command.version, sends_version))
        pieces = [(0, self._published.travelling(command.version))] if sends_version else None
        peer.line.send(work, pieces=pieces, will_be_answered=True)

    def _cancel_task(self, peer: RemoteWorker, command: Interrupt) -> None:
        peer.line.send(Interrupting(command.draw))

    def replace(self, command: RestartWorker) -> None:
        """Keep it: only who has started it can start another one in its place."""

    def evaluate(self, command: Evaluate) -> None:
        """Send the version to the process that evaluates."""
        assert self._evaluator is not None
        version = self._versions.acquire(command.version)
        self._slices.send(Evaluating(self._evaluator.ticket, command.version))
        self._evaluator.line.send(
            RemoteEvaluateTask(command.version), pieces=[(0, version.memory)], will_be_answered=True
        )

    # --- events -------------------------------------------------------------------------------------------

    def _read(self, key: selectors.SelectorKey) -> None:
        match self._inbox.get():
            case PeerJoined() as entered:
                self._enter(entered)
            case PeerRejected(reason):
                if not self._begun_s:
                    raise UsageError(reason)
                LOG.warning("rejected a process: %s", reason)
            case (PeerMessage() | PeerLost()) as news if (number := self._slices.number_of(news.ticket)) is not None:
                self._hear_slice(number, news)
            case PeerMessage() as heard if heard.ticket in self._members:
                self._hear(self._members[heard.ticket], heard)
            case PeerLost(ticket, reason) if ticket in self._members:
                self._gone(self._members.pop(ticket), reason)
            case AllWorkersLost(joined) if joined == self._joined:
                reason = f"every worker is gone, and nobody has come for {self._cluster.start_timeout_s:g} s"
                self._events.append(AbortRun(self._elapsed_s(), Outcome.NO_WORKERS, reason))

    def _enter(self, entered: PeerJoined) -> None:
        if entered.worker > self._cluster.n:
            self._slices.enter(entered.worker - self._cluster.n, entered.ticket, entered.line)
            return
        for before in [each for each in self._members.values() if each.worker == entered.worker]:
            self._dismiss(before, "another process has come in its place")  # its host may be gone without a word
        member = RemoteWorker(entered.ticket, entered.worker, entered.line, self._slices.numbers)
        self._members[entered.ticket] = member
        self._admit(member)

    def _admit(self, member: RemoteWorker) -> None:
        """Let a process take part if all servers know it."""
        if member.strangers:
            return
        member.is_ready = True
        if member.worker == self._cluster.n:
            self._evaluator = member
        else:
            self._workers[member.worker] = member
            self._joined += 1
            self._events.append(Joined(self._elapsed_s(), member.worker))

    def _hear_slice(self, number: int, news: PeerMessage | PeerLost) -> None:
        if isinstance(news, PeerLost):
            self._slices.gone(number, news.reason)
            return
        match news.message:
            case GradientReceived(ticket, draw) if ticket in self._members:
                member = self._members[ticket]
                self._deliver(member, member.came(number, draw))
            case {"admitted": ticket} if ticket in self._members:
                member = self._members[ticket]
                member.strangers.discard(number)
                self._admit(member)
            case {"parted": ticket, "reason": reason} if ticket in self._members:
                self._dismiss(self._members[ticket], f"the server of slice {number} has lost it: {reason}")
            case said:
                self._slices.hear(number, said)

    def _hear(self, member: RemoteWorker, heard: PeerMessage) -> None:
        match heard.message:
            case RemoteTaskDone() as finished:
                self._deliver(member, member.finished(finished, heard))
            case RemoteTaskCancelled():
                self._next(member)
            case {"metrics": metrics, "version": version}:
                self._versions.release(version)
                self._events.append(Evaluated(self._elapsed_s(), version, metrics))
            case {"leaves": reason}:
                self._dismiss(member, str(reason))
            case {"failed": message, "is_usage": is_usage}:
                if is_usage:
                    raise UsageError(message)
                LOG.error("worker %d failed: %s; its own log has the traceback", member.worker, message)
                if not self._begun_s:
                    raise RunError(f"worker {member.worker} failed while it started: {message}")
                self._dismiss(member, str(message))

    def _deliver(self, member: RemoteWorker, arriving: Arriving | None) -> None:
        """Report a gradient, if all of it has come."""
        if arriving is None:
            return
        finished, at_s, push_s = arriving
        pull_s = max(0.0, at_s - member.sent_s - finished.busy_s)
        if self._slices.numbers:
            push_s = max(push_s, time.monotonic() - at_s)  # another part may have come last
        self._tell_load(self._survey.hear(member.worker, finished.compute_s, pull_s + push_s))
        self._arrived(member.worker, finished.draw, finished.measured, pull_s=pull_s, push_s=push_s)

    def _tell_load(self, said: str | None) -> None:
        if said is not None:
            LOG.log(logging.WARNING if self._survey.is_bottleneck else logging.INFO, "%s", said)

    def _gone(self, member: RemoteWorker, reason: str) -> None:
        self._slices.tell({"dismiss": member.ticket})
        if member is self._evaluator:
            raise RunError(f"the process that evaluates ended: {reason}")
        self._lost(member.worker, member, reason)
        self._tell_load(self._survey.lose(member.worker))
        if self._begun_s and not self._is_anybody_there:
            timer = threading.Timer(self._cluster.start_timeout_s, self._inbox.put, [AllWorkersLost(self._joined)])
            self._patience.append(timer)
            timer.start()

    @property
    def _is_anybody_there(self) -> bool:
        return any(each.is_ready for each in self._workers.values())

    def _dismiss(self, member: RemoteWorker, reason: str) -> None:
        """End the line to a process, which waits for that if it has asked for it."""
        assert self._door is not None
        del self._members[member.ticket]
        self._door.shut(member.ticket)
        self._gone(member, reason)


def _nbytes_of_slices(cluster: Torchrun, server: ParameterServer) -> list[int]:
    """Return the bytes of each slice on the wire."""
    layouts = [FlatLayout(server.model, cluster.slices, only=number) for number in range(cluster.slices)]
    return [WireFormat(cluster.wire, layout).nbytes for layout in layouts]
