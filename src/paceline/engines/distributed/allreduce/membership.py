"""Rank 0 of workers without a server: who takes part, and what they have told of an iteration."""

from __future__ import annotations

import queue
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import Event, Joined, Lost
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup, MissingPeers, Unreachable
from paceline.engines.distributed.allreduce.messages import MembershipChanged, StepReport, StepSummary
from paceline.engines.distributed.rendezvous.acceptor import GRACE_S, AcceptedPeer, Gate, News, PeerRejected
from paceline.engines.distributed.rendezvous.rendezvous import Rendezvous, call
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.process_group import PendingCollective
from paceline.engines.signals import is_sigterm_held
from paceline.errors import RunError, UsageError
from paceline.server.flat_buffers import FlatBuffers
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)

LOOK_AGAIN_S = 0.05
MakeState = Callable[[list[Event]], dict[str, Any]]


class _Changed(NamedTuple):
    """Somebody of this generation is gone, has come, or cannot sum any more."""

    generation: int
    reason: str


class MembershipServer:
    """Gathers what every worker tells of an iteration, and forms the ring of those who take part.

    A table is closed in the thread that hears the last one, so that nobody waits until this process has computed.

    Args:
        cluster: where to listen, and who is to come.
        agreement: what every process has to agree on.
        clock: gives seconds since the run began.
    """

    def __init__(self, cluster: Torchrun, agreement: dict[str, Any], clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._agreement = agreement
        self._clock = clock
        self._lock = threading.Condition()
        self._news: queue.SimpleQueue[StepSummary | _Changed] = queue.SimpleQueue()
        self._members: dict[int, AcceptedPeer] = {}
        self._came: dict[int, AcceptedPeer] = {}
        self._gone: dict[int, str] = {}
        self._hands: dict[int, StepReport] = {}
        self._answers: dict[int, bool] = {}  # who is there, and whether it is as far as the others
        self._broken: dict[int, bool] = {}  # who can no longer sum in this generation, and whether it could never
        self._reason = ""  # of the first of them
        self._failure: Exception | None = None
        self._end: dict[str, Any] | None = None  # of the run
        self._meeting: Rendezvous | None = None
        self._told: EventQueue[News] | None = None  # of those who were turned away
        self._gate: Gate | None = None
        self._steps = 0
        self.generation = 0
        self.ring: ElasticGroup | None = None

    # --- what the engine asks -----------------------------------------------------------------------------

    def open(self) -> None:
        """Wait until everybody has come.

        Raises:
            UsageError: somebody does not agree.
            RunError: somebody has not come.
        """
        cluster = self._cluster
        self._meeting = call(cluster)
        told: EventQueue[News] = EventQueue()
        self._told = told
        rooms = [None] * cluster.n
        self._gate = Gate(self, self._meeting, cluster.ranks.token, self._agreement, rooms, told)
        deadline = time.monotonic() + cluster.start_timeout_s
        while missing := [worker for worker in range(1, cluster.n) if worker not in self._came]:
            self._check()
            if is_sigterm_held():
                raise KeyboardInterrupt  # there is no run yet that could be saved
            if select.select([told], [], [], LOOK_AGAIN_S)[0] and isinstance(news := told.get(), PeerRejected):
                raise UsageError(news.reason)
            if time.monotonic() > deadline:
                raise RunError(
                    f"worker {', '.join(map(str, missing))} did not come within start_timeout_s = "
                    f"{cluster.start_timeout_s:g} s: see what its rank says"
                )

    def form(self, make_state: MakeState, timeout_s: float) -> dict[str, Any]:
        """Form a ring of those who are there, and give them the state to go on from, until one stays whole.

        Args:
            make_state: of the events that have led to it.
            timeout_s: for which those are waited for who still compute.

        Raises:
            RunError: somebody is gone whom this run does not go on without.
        """
        events: list[Event] = []
        assert self._meeting is not None
        while True:
            events += self._next_generation()
            ring, workers = self._begin_ring()
            try:
                ring.connect(self._meeting.place, self._cluster.silence_s, timeout_s)
                return ring.spread(make_state(events))
            except MissingPeers as error:
                self._expel([workers[place] for place in error.places], timeout_s)
            except ConnectionLost as error:
                self._note_broken(0, str(error), is_apart=isinstance(error, Unreachable))

    def begin_sum(self, vectors: FlatBuffers) -> list[PendingCollective]:
        """Begin to sum vectors up where they lie; return what is to be waited for.

        Raises:
            Reform: somebody is gone.
        """
        assert self.ring is not None
        self._steps += 1
        with self._reforming():
            return self.ring.begin_sum(vectors)

    def hand_in(self, hand: StepReport) -> None:
        """Tell of this process's own part in an iteration."""
        with self._lock:
            self._steps += 1
            self._take(0, hand)

    def table(self, timeout_s: float) -> StepSummary:
        """Wait until everybody has told of an iteration, or is silent for too long.

        Raises:
            Reform: somebody is gone.
        """
        while True:
            try:
                news = self._news.get(timeout=timeout_s)
            except queue.Empty:
                self._expel_idle(timeout_s)
                continue
            if news.generation != self.generation:
                continue
            if isinstance(news, StepSummary):
                return news
            raise MembershipChanged(news.reason)

    def wait(self, begun: list[PendingCollective], timeout_s: float) -> None:
        """Wait for sums, however long they take; every so long, see whether everybody still takes part.

        Raises:
            Reform: somebody is gone.
        """
        assert self.ring is not None
        with self._reforming():
            while not self.ring.wait(begun, timeout_s):
                self._expel_idle(timeout_s)
                if self._broken:
                    raise MembershipChanged(self._reason)

    def metrics(self, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Measure, and tell everybody."""
        measured = measure()
        self._tell_all({"metrics": measured, "generation": self.generation})
        return measured

    def is_over(self) -> bool:
        """Return whether the run is over, when this process has come to its end."""
        self._check()
        return True

    def close(self, end: dict[str, Any]) -> None:
        """Tell everybody that and why the run is over, and let go of them when they have gone."""
        if self._gate is not None:
            self._gate.announce_end(end)
        with self._lock:
            self._end = end
            members = [*self._members.values(), *self._came.values()]
            self._members.clear()
            self._came.clear()
        for member in members:
            member.line.tell({"end": end})
        if self._gate is not None:
            self._gate.wait([member.ticket for member in members], GRACE_S)
        if self._told is not None and (self._gate is None or self._gate.close()):
            self._told.close()
        if self.ring is not None:
            if "error" in end:
                self.ring.break_off()
            self.ring.let_go()
        self._gate = self._told = self._meeting = self.ring = None

    # --- what the threads tell that listen ----------------------------------------------------------------

    def enter(self, worker: int, member: AcceptedPeer) -> None:
        """Let a process take part, from the next iteration on."""
        with self._lock:
            if self._end is not None:
                member.line.tell({"end": self._end})
                return
            if self.generation and not self._cluster.elastic:
                reason = "the run has begun; only torchrun(elastic=true) takes in who comes later"
                member.line.tell({"end": {"error": reason, "is_usage": True}})
                return
            before = self._members.get(worker) or self._came.get(worker)
            self._came[worker] = member
        if before is not None:
            self.leave(worker, before.ticket, "another process has come in its place")

    def hear(self, worker: int, ticket: int, text: dict[str, Any]) -> None:
        """Take in what a worker says."""
        match text:
            case {"hand": numbers}:
                hand = StepReport(*numbers)
                with self._lock:
                    if hand.generation == self.generation and worker in self._members:
                        self._members[worker].line.settle()
                        self._take(worker, hand)
            case {"here": generation, "steps": steps, "is_summing": is_summing}:
                with self._lock:
                    if generation == self.generation:
                        self._answers[worker] = steps >= self._steps or is_summing
                        self._lock.notify_all()
            case {"broken": reason, "generation": generation, "is_apart": is_apart}:
                with self._lock:
                    if generation == self.generation:
                        self._note_broken(worker, reason, is_apart=is_apart)
            case {"failed": message, "is_usage": is_usage}:
                if is_usage:
                    self.fail(UsageError(message))
                else:
                    LOG.error("worker %d failed: %s; its own log has the traceback", worker, message)
                    self._dismiss(worker, ticket, message)
            case {"leaves": reason}:
                self._dismiss(worker, ticket, reason)

    def leave(self, worker: int, ticket: int, reason: str) -> None:
        """Note that a process is gone."""
        with self._lock:
            for those in (self._members, self._came):
                if worker in those and those[worker].ticket == ticket:
                    name = those.pop(worker).name
                    if those is self._members:
                        self._gone[worker] = f"{name}: {reason}"
                        self._news.put(_Changed(self.generation, reason))
                        if self.ring is not None:
                            self.ring.break_off()
            self._lock.notify_all()

    def fail(self, error: Exception) -> None:
        """Let the run end with this."""
        with self._lock:
            self._failure = self._failure or error
            self._news.put(_Changed(self.generation, str(error)))
            if self.ring is not None:
                self.ring.break_off()
            self._lock.notify_all()

    # --- inside -------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _reforming(self) -> Iterator[None]:
        try:
            yield
        except ConnectionLost as error:
            with self._lock:
                self._reason = self._reason or f"worker 0: {error}"
            raise MembershipChanged(str(error)) from error

    def _note_broken(self, worker: int, reason: str, *, is_apart: bool) -> None:
        with self._lock:
            if worker or is_apart:
                self._broken[worker] = is_apart
            self._reason = self._reason or f"worker {worker}: {reason}"
            if self.ring is not None:
                self.ring.give_up()  # others whom it does not concern would call themselves broken, too
            self._news.put(_Changed(self.generation, self._reason))
            self._lock.notify_all()

    def _dismiss(self, worker: int, ticket: int, reason: str) -> None:
        """End the line to a process that waits for that."""
        assert self._gate is not None
        self.leave(worker, ticket, reason)
        self._gate.hang_up(ticket)

    def _take(self, worker: int, hand: StepReport) -> None:
        self._hands[worker] = hand
        if self._gone or len(self._hands) <= len(self._members):
            return
        hands = {each: self._hands[each] for each in sorted(self._hands)}
        self._hands = {}
        table = StepSummary(self.generation, self._clock(), bool(self._came), hands)
        self._tell_all(table.as_json())
        self._news.put(table)

    def _tell_all(self, text: dict[str, Any]) -> None:
        with self._lock:
            for member in self._members.values():
                member.line.tell(text, will_be_answered="table" in text)

    def _next_generation(self) -> list[Event]:
        """Return who is gone and who has come since the last one; at the beginning, that is nothing to tell."""
        self._await_who_is_gone()
        now = self._clock()
        with self._lock:
            self._check()
            if self._gone and not self._cluster.elastic:
                raise RunError(f"a worker is gone: {'; '.join(self._gone.values())}; {GO_ON}")
            events: list[Event] = [Lost(now, worker, self._gone[worker]) for worker in sorted(self._gone)]
            if self.generation:
                events += [Joined(now, worker) for worker in sorted(self._came)]
            self._members |= self._came
            self._came.clear()
            self._gone.clear()
            self._hands.clear()
            self._broken.clear()
            self._reason = ""
            self._steps = 0
            self.generation += 1
        return events

    def _begin_ring(self) -> tuple[ElasticGroup, list[int]]:
        """Tell everybody to come to a ring; return it, and who has which place."""
        with self._lock:
            workers = [0, *sorted(self._members)]
            members = [self._members[worker] for worker in workers[1:]]
            uses_nccl = self._cluster.has_gpu_each(torch.cuda.device_count()) and all(m.has_own_gpu for m in members)
            key = secrets.token_hex(32)  # whoever finds the store, but does not know the token, cannot take a place
            form = {"form": self.generation, "key": key, "size": len(workers), "uses_nccl": uses_nccl}
            for place, member in enumerate(members, start=1):
                member.line.tell({**form, "place": place})
            before, self.ring = self.ring, ElasticGroup(key, 0, len(workers), uses_nccl=uses_nccl)
        if before is not None:
            before.break_off()
            before.let_go()
        return self.ring, workers

    def _await_who_is_gone(self) -> None:
        """Wait a moment for the news of who it is whose end has broken the ring."""
        if not self.generation or self._came:
            return
        with self._lock:
            is_known = self._lock.wait_for(lambda: self._gone or self._came or self._failure, GRACE_S)
            if not is_known and (not self._cluster.elastic or any(self._broken.values())):
                raise RunError(self._who_is_apart())

    def _who_is_apart(self) -> str:
        apart = [worker for worker, is_apart in self._broken.items() if is_apart]
        broken = [self._members[worker].name if worker else "worker 0" for worker in sorted(apart or self._broken)]
        who = " and ".join(broken) if len(broken) == 2 else ", ".join(broken) or "workers"
        return (
            f"{who} do not reach each other, though they are there ({self._reason}): mend the link between their "
            "hosts, or start them elsewhere; torchrun --max-restarts 3 goes on from the last checkpoint in out="
        )

    def _expel_idle(self, timeout_s: float) -> None:
        """Let go of whom everybody waits for, unless it waits for the network itself."""
        with self._lock:
            self._answers.clear()
            self._tell_all({"are you there": self.generation})
            self._lock.wait_for(lambda: self._answers.keys() >= self._members.keys(), GRACE_S)
            idle = [worker for worker in self._members if not self._answers.get(worker, False)]
        self._expel(idle, timeout_s)

    def _expel(self, workers: list[int], timeout_s: float) -> None:
        for worker in workers:
            with self._lock:
                member = self._members.get(worker)
            if member is not None:
                self.leave(worker, member.ticket, f"silent for {timeout_s:g} s")
                member.line.close()


GO_ON = "torchrun(elastic=true) goes on without it, and torchrun --max-restarts 3 from the last checkpoint in out="
