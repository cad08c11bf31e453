"""Runs the workers of other processes, on any host, and reports what they do."""

from __future__ import annotations

import selectors
import sys
import threading
import time
from typing import Any

import torch

from paceline.cluster import cores
from paceline.coordinator import Coordinator
from paceline.engines.base import Observer
from paceline.engines.distributed.assistants import Assistant
from paceline.engines.distributed.door import Deserted, Door, Entered, Gone, Heard, News, TurnedAway
from paceline.engines.distributed.inbox import Inbox
from paceline.engines.distributed.line import Line
from paceline.engines.distributed.link_load import Survey
from paceline.engines.distributed.meeting import Meeting
from paceline.engines.distributed.messages import Abandoned, Ending, Evaluation, Finished, Interrupting, Work
from paceline.engines.distributed.published import Published
from paceline.engines.distributed.wire import Travelling, Wire
from paceline.engines.realtime import Peer, RealTimeEngine
from paceline.errors import RunError, UsageError
from paceline.events import Apply, Compute, Evaluate, Evaluated, Event, Interrupt, Joined, Outcome, Quit, Replace, Stop
from paceline.job import Job
from paceline.server import ParameterServer
from paceline.torchrun import Torchrun
from paceline.vectors import Layout

GRACE_S = 5.0
SLOWEST_BYTES_PER_S = 50e6  # at which the parameters are still sent to everybody at the end
NO_VERSION = -1


class _Member(Peer):
    """A process that takes part."""

    def __init__(self, ticket: int, worker: int, line: Line) -> None:
        super().__init__()
        self.is_ready = True
        self.ticket = ticket
        self.worker = worker
        self.line = line
        self.holds = NO_VERSION  # which it was sent last
        self.sent_s = 0.0  # when it was given its work


class DistributedEngine(RealTimeEngine[_Member]):
    """Coordinator and server in this process, rank 0, and workers in others.

    Args:
        job: what to train.
        cluster: where to listen.
        server: owns the parameters.
        layout: of the model.
        agreement: what every process has to agree on.
    """

    def __init__(
        self, job: Job, cluster: Torchrun, server: ParameterServer, layout: Layout, agreement: dict[str, Any]
    ) -> None:
        self._needs_evaluator = job.eval_data is not None
        rooms = cluster.n + self._needs_evaluator
        self._wire = Wire(cluster.wire, layout)
        self._published = Published(server, layout, self._wire)
        self._survey = Survey(cluster.n, self._wire.nbytes, cluster.bytes_per_s)
        super().__init__(server, self._published, [layout.allocate() for _ in range(rooms)])
        self._cluster = cluster
        self._agreement = agreement
        self._inbox: Inbox[News] = Inbox()
        self._door: Door | None = None
        self._members: dict[int, _Member] = {}  # by ticket
        self._joined = 0  # workers so far
        self._evaluator: _Member | None = None
        self._assistants: list[Assistant] = []
        self._patience: list[threading.Timer] = []  # with a run that has no worker left
        self._end: dict[str, Any] = {}

    def _start(self) -> None:
        torch.set_num_threads(max(1, cores() // self._cluster.ranks.local_world_size))
        meeting = Meeting(self._cluster)
        rooms = [Travelling(self._wire, gradient) for gradient in self._gradients]
        self._door = Door(meeting, self._cluster.ranks.token, self._agreement, rooms, self._inbox)
        if self._cluster.has_worker_at_server:
            self._assistants.append(Assistant(0))
        if self._needs_evaluator:
            self._assistants.append(Assistant(self._cluster.n))
        self._selector.register(self._inbox, selectors.EVENT_READ)
        self._await_everybody()
        self._events.clear()  # they were there from the beginning

    def _await_everybody(self) -> None:
        deadline = time.monotonic() + self._cluster.start_timeout_s
        while missing := self._missing():
            for key, _ in self._selector.select(timeout=0.2):
                self._read(key)
            for assistant in self._assistants:
                assistant.check()
            if time.monotonic() > deadline:
                raise RunError(
                    f"worker {', '.join(map(str, missing))} did not come within start_timeout_s = "
                    f"{self._cluster.start_timeout_s:g} s: see what its rank says"
                )

    def _missing(self) -> list[int]:
        """Return who is needed and not there."""
        there = [member.worker for member in self._members.values() if member.is_ready]
        return [worker for worker in range(len(self._gradients)) if worker not in there]

    def _close(self, error: BaseException | None) -> None:
        for assistant in self._assistants[self._cluster.has_worker_at_server :]:
            assistant.kill()  # nobody waits for an evaluation any more
        if self._members:
            self._take_leave({"error": str(error), "is_usage": isinstance(error, UsageError)} if error else self._end)
        for timer in self._patience:
            timer.cancel()
            timer.join()
        if self._door is None or self._door.close():
            self._inbox.close()
        for assistant in self._assistants:
            assistant.end()
        self._members.clear()
        self._workers.clear()
        self._evaluator = self._door = None  # and with the lines and the store the ports are free again
        self._selector.close()

    def _take_leave(self, end: dict[str, Any]) -> None:
        """Send everybody the parameters and why the run ended, and wait until they have gone."""
        assert self._door is not None
        last = self._versions[self._versions.newest].memory
        for member in self._members.values():
            member.line.send(Ending(self._versions.newest), last)
            member.line.tell({"end": end})
        self._door.wait(list(self._members), GRACE_S + len(self._members) * last.nbytes / SLOWEST_BYTES_PER_S)

    def run(self, coordinator: Coordinator, observe: Observer | None = None, first: Event | None = None) -> Stop:
        """Run to the end and return what ended it, which the workers are told too."""
        stop = super().run(coordinator, observe, first)
        self._end = {"outcome": stop.outcome.value, "reason": stop.reason, "time_s": self.now}
        return stop

    # --- commands -----------------------------------------------------------------------------------------

    def apply(self, command: Apply) -> None:
        """Make the update, elsewhere if the version before is still read, and publish it where it is made."""
        self._published.make_way()
        super().apply(command)

    def _publish(self, version: int) -> None:
        self._published.take_over(version)

    def _send(self, peer: _Member, command: Compute) -> None:
        minibatch = command.minibatch or (None, None, None)
        sends_version = peer.holds != command.version
        work = Work(command.draw, command.version, sends_version, self._elapsed_s(), *minibatch)
        peer.holds = command.version
        peer.sent_s = time.monotonic()
        pieces = [(0, self._published.travelling(command.version))] if sends_version else []
        peer.line.send(work, pieces=pieces, will_be_answered=True)

    def _tell_to_abandon(self, peer: _Member, command: Interrupt) -> None:
        peer.line.send(Interrupting(command.draw))

    def replace(self, command: Replace) -> None:
        """Keep it: only who has started it can start another one in its place."""

    def evaluate(self, command: Evaluate) -> None:
        """Send the version to the process that evaluates."""
        assert self._evaluator is not None
        version = self._versions.hold(command.version)
        self._evaluator.line.send(Evaluation(command.version), pieces=[(0, version.memory)], will_be_answered=True)

    # --- events -------------------------------------------------------------------------------------------

    def _read(self, key: selectors.SelectorKey) -> None:
        match self._inbox.get():
            case Entered() as entered:
                self._enter(entered)
            case TurnedAway(reason):
                if not self._begun:
                    raise UsageError(reason)
                print(f"paceline: a process was turned away: {reason}", file=sys.stderr)
            case Heard() as heard if heard.ticket in self._members:
                self._hear(self._members[heard.ticket], heard)
            case Gone(ticket, reason) if ticket in self._members:
                self._gone(self._members.pop(ticket), reason)
            case Deserted(joined) if joined == self._joined:
                reason = f"every worker is gone, and nobody has come for {self._cluster.start_timeout_s:g} s"
                self._events.append(Quit(self._elapsed_s(), Outcome.NO_WORKERS, reason))

    def _enter(self, entered: Entered) -> None:
        for before in [each for each in self._members.values() if each.worker == entered.worker]:
            self._dismiss(before, "another process has come in its place")  # its host may be gone without a word
        member = _Member(entered.ticket, entered.worker, entered.line)
        self._members[entered.ticket] = member
        if entered.worker == self._cluster.n:
            self._evaluator = member
        else:
            self._workers[entered.worker] = member
            self._joined += 1
            self._events.append(Joined(self._elapsed_s(), entered.worker))

    def _hear(self, member: _Member, heard: Heard) -> None:
        match heard.message:
            case Finished() as finished:
                pull_s = max(0.0, heard.at_s - member.sent_s - finished.busy_s)
                self._tell_load(member.worker, finished.compute_s, pull_s + heard.contents_s)
                self._arrived(
                    member.worker,
                    finished.draw,
                    finished.measured,
                    pull_s=pull_s,
                    push_s=heard.contents_s,
                )
            case Abandoned():
                self._next(member)
            case {"metrics": metrics, "version": version}:
                self._versions.release(version)
                self._events.append(Evaluated(self._elapsed_s(), version, metrics))
            case {"leaves": reason}:
                self._dismiss(member, str(reason))
            case {"failed": message, "details": details, "is_usage": is_usage}:
                if is_usage:
                    raise UsageError(message)
                print(f"worker {member.worker} failed:\n{details}", file=sys.stderr)
                if not self._begun:
                    raise RunError(f"worker {member.worker} failed while it started: {message}")
                self._dismiss(member, str(message))

    def _tell_load(self, worker: int, compute_s: float, network_s: float) -> None:
        said = self._survey.hear(worker, compute_s, network_s)
        if said is not None:
            print(f"paceline: {said}", file=sys.stderr)

    def _gone(self, member: _Member, reason: str) -> None:
        if member is self._evaluator:
            raise RunError(f"the process that evaluates ended: {reason}")
        self._lost(member.worker, member, reason)
        if self._begun and not self._is_anybody_there:
            timer = threading.Timer(self._cluster.start_timeout_s, self._inbox.put, [Deserted(self._joined)])
            self._patience.append(timer)
            timer.start()

    @property
    def _is_anybody_there(self) -> bool:
        return any(each.is_ready for each in self._workers.values())

    def _dismiss(self, member: _Member, reason: str) -> None:
        """End the line to a process, which waits for that if it has asked for it."""
        assert self._door is not None
        del self._members[member.ticket]
        self._door.shut(member.ticket)
        self._gone(member, reason)
