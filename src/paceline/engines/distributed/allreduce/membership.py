"""Membership server: rank 0 of an all-reduce run forms the groups and collects the reports of all ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from paceline.core.events import Compute, Event, Joined, Lost
from paceline.engines.distributed.allreduce.base import GroupMembership, MakeState
from paceline.engines.distributed.allreduce.breakage import Breakage
from paceline.engines.distributed.allreduce.elastic_group import (
    ElasticGroup,
    MembershipChanged,
    MissingPeers,
    Unreachable,
)
from paceline.engines.distributed.allreduce.members import Members, have_own_gpus
from paceline.engines.distributed.allreduce.progress_monitor import ProgressMonitor, waits_s
from paceline.engines.distributed.allreduce.step_reports import StepReports
from paceline.engines.distributed.failed_worker import why_failed
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.acceptor import GRACE_S, AcceptedPeer, Acceptor
from paceline.engines.distributed.rendezvous.first_workers import await_workers, not_joined
from paceline.engines.distributed.rendezvous.rendezvous import listen_as_rank_0
from paceline.engines.distributed.transport import messages, sum_messages
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.encoded import encoded
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.process_group import PendingCollective
from paceline.engines.signals import is_sigterm_held
from paceline.errors import RunError, UsageError
from paceline.utils.rank_logger import RankLogger
from paceline.worker.task_runner import gpu_of

LOG = RankLogger(__name__)
POLL_S = 0.05  # between two looks for a SIGTERM that is held
ALTERNATIVES = "torchrun(min_workers=1) continues without it, paceline run from the last checkpoint in out="


class _GroupChanged(NamedTuple):
    """A member of this generation has left, has joined, or can no longer sum."""

    generation: int
    reason: str


class MembershipServer(GroupMembership):
    """Membership of the groups in which all ranks sum.

    A summary is completed in the thread that receives the last report, so that no rank waits for this process's
    computation. The methods `on_join` to `fail` are the callbacks of the acceptor, in the thread of the sockets.

    Args:
        rank: settings of this process.
        job_spec: settings that must be equal on all processes.
        reports: reports of an iteration, none yet.
    """

    def __init__(self, rank: Rank, job_spec: dict[str, Any], reports: StepReports) -> None:
        super().__init__()
        self._rank = rank
        self._cluster = rank.cluster
        self._job_spec = job_spec
        self._reports = reports
        self._lock = threading.Condition()
        self._results: queue.SimpleQueue[sum_messages.StepSummary | _GroupChanged] = queue.SimpleQueue()
        self._members = Members()
        self._joining: dict[int, AcceptedPeer] = {}
        self._lost: dict[int, str] = {}
        self._progress = ProgressMonitor(self._send_all)
        self._link_checks = 0
        self._store: GroupStore | None = None  # of the current group
        self._host = ""  # address of this host for its members
        self._breakage = Breakage()
        self._failure: Exception | None = None
        self._end: messages.End | None = None
        self._acceptor: Acceptor | None = None

    def open(self) -> None:
        """Wait until all ranks have joined."""
        self._acceptor = listen_as_rank_0(self._cluster, self._rank.transport, self._job_spec, self._cluster.n, self)
        await_workers(self._cluster, self._joined, self._wait_for_join)

    def _joined(self) -> set[int]:
        with self._lock:
            self._check()
            return {0, *self._joining}

    def _wait_for_join(self) -> None:
        if is_sigterm_held():
            raise KeyboardInterrupt  # there is no run yet that could be saved
        with self._lock:
            self._lock.wait(POLL_S)

    def form(self, make_state: MakeState, timeout_s: float) -> dict[str, Any]:
        """Form a group of all ranks and broadcast the state from which it starts, until a group stays complete."""
        events: list[Event] = []
        while True:
            events += self._next_generation()
            group, workers = self._announce_group()
            try:
                group.connect(self._rank.transport, self._host, timeout_s)
                return group.broadcast_state(make_state(events))
            except MissingPeers as error:
                self._expel([workers[rank] for rank in error.ranks], timeout_s)
            except ConnectionLost as error:
                self._on_broken(0, str(error), is_unreachable=isinstance(error, Unreachable))

    def report(self, report: sum_messages.StepReport, tasks: Mapping[int, Compute]) -> None:
        """Add the report of rank 0."""
        with self._lock:
            self._steps += 1
            self._reports.expect(tasks)
            self._add_report(0, report)

    def summary(self, timeout_s: float) -> sum_messages.StepSummary:
        """Wait for the reports of all ranks; expel ranks that are silent longer than the timeout."""
        waits_s = self._waits_s(timeout_s)
        while True:
            try:
                result = self._results.get(timeout=next(waits_s))
            except queue.Empty:
                continue
            if result.generation == self.generation:
                if isinstance(result, sum_messages.StepSummary):
                    return result
                raise MembershipChanged(result.reason)

    def wait(self, pending: list[PendingCollective], timeout_s: float) -> None:
        """Wait for sums; after each timeout, expel the ranks that do not take part."""
        assert self.group is not None
        with self._raising_membership_changed():
            for wait_s in self._waits_s(timeout_s):
                if self.group.wait(pending, wait_s):
                    return
                if self._breakage.is_known:
                    raise MembershipChanged(self._breakage.reason)

    def _waits_s(self, timeout_s: float) -> Iterator[float]:
        """Yield how long to wait for all ranks; in between, expel idle ranks, and check the links of the others."""
        link_timeout_s = self._rank.transport.heartbeat_timeout_s
        return waits_s({lambda: self._expel_idle(timeout_s): timeout_s, self._check_links: link_timeout_s})

    def metrics(self, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Measure, and send the metrics to all ranks."""
        measured = measure()
        self._send_all(sum_messages.MetricsMeasured(self.generation, encoded(measured)))
        return measured

    def is_over(self) -> bool:
        """Return whether the run is over when rank 0 has reached its end."""
        self._check()
        return True

    def close(self, end: messages.End, error: BaseException | None = None) -> None:
        """Send the end of the run to all ranks, wait until they have gone, and release all resources."""
        if self._acceptor is not None:
            self._acceptor.announce_end(end)
        with self._lock:
            self._end = end
            peers = [*self._members.values(), *self._joining.values()]
            self._members.clear()
            self._joining.clear()
        for peer in peers:
            peer.connection.send(end)
        if self._acceptor is not None:
            self._acceptor.join([peer.peer_id for peer in peers], GRACE_S)
            self._acceptor.close()
        self._close_group(end)
        self._acceptor = None

    # --- callbacks of the acceptor ------------------------------------------------------------------------

    def on_join(self, peer: AcceptedPeer) -> None:
        """Let a rank take part from the next iteration on."""
        with self._lock:
            if self._end is not None:
                peer.connection.send(self._end)
                return
            if self.generation and not self._cluster.is_elastic:
                reason = "the run has begun; only torchrun(min_workers=N) and torchrun(max_workers=N) admit ranks later"
                peer.connection.send(messages.End("failed", reason, is_usage=True))
                return
            previous = self._members.get(peer.worker) or self._joining.get(peer.worker)
            self._joining[peer.worker] = peer
            self._lock.notify_all()
        if previous is not None:
            self.on_leave(previous, "replaced by another process")

    def on_message(self, peer: AcceptedPeer, message: Message, at_s: float = 0.0, contents_s: float = 0.0) -> None:
        """Handle a message of a rank."""
        worker = peer.worker
        with self._lock:
            match message:
                case sum_messages.StepReport(generation=generation):
                    if generation == self.generation and worker in self._members:
                        self._add_report(worker, message)
                case sum_messages.StoreKey(generation):
                    if generation == self.generation and worker in self._members and self._store is not None:
                        self._store.put(message)
                        self._send_all(message, worker)
                case sum_messages.Progress():
                    self._progress.on_progress(worker, message)
                case sum_messages.GroupBroken(generation, reason, is_unreachable) if generation == self.generation:
                    self._on_broken(worker, reason, is_unreachable=is_unreachable)
        match message:
            case messages.Failed() as failed:
                try:
                    self._disconnect(peer, why_failed(failed, worker, self._rank.folder))
                except UsageError as error:
                    self.fail(error)
            case messages.Leave(reason):
                self._disconnect(peer, reason)

    def on_leave(self, peer: AcceptedPeer, reason: str) -> None:
        """Handle the loss of a rank."""
        with self._lock:
            for peers in (self._members, self._joining):
                # Another process may have taken the number of this one.
                if (known := peers.get(peer.worker)) is not None and known.peer_id == peer.peer_id:
                    del peers[peer.worker]
                    if peers is self._members:
                        self._lost[peer.worker] = f"{known.name}: {reason}"
                        self._end_generation(reason)
            self._lock.notify_all()

    def on_reject(self, reason: str) -> None:
        """Handle a rank with another job: the run cannot begin, or continues without it."""
        if self.generation:
            LOG.warning("rejected a process: %s", reason)
        else:
            self.fail(UsageError(reason))

    def fail(self, error: Exception) -> None:
        """End the run with this error."""
        with self._lock:
            self._failure = self._failure or error
            self._end_generation(str(error))
            self._lock.notify_all()

    def _end_generation(self, reason: str) -> None:
        self._results.put(_GroupChanged(self.generation, reason))
        if self.group is not None:
            self.group.abort()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _raising_membership_changed(self) -> Iterator[None]:
        try:
            yield
        except ConnectionLost as error:
            with self._lock:
                self._breakage.add_reason(0, str(error))
            raise MembershipChanged(str(error)) from error

    def _on_broken(self, worker: int, reason: str, *, is_unreachable: bool) -> None:
        with self._lock:
            self._breakage.add(worker, reason, is_unreachable=is_unreachable)
            if self.group is not None:
                self.group.abort_locally()  # an abort would make other members report the group as broken too
            self._results.put(_GroupChanged(self.generation, self._breakage.reason))
            self._lock.notify_all()

    def _disconnect(self, peer: AcceptedPeer, reason: str) -> None:
        self.on_leave(peer, reason)
        peer.connection.close()

    def _add_report(self, worker: int, report: sum_messages.StepReport) -> None:
        self._reports.add(worker, report)
        if self._lost or not self._reports.are_of(1 + len(self._members)):
            return
        for each, reason in self._reports.refused().items():
            self._disconnect(self._members[each], reason)
        if not self._lost:
            summary = self._reports.take(self.generation, reforms=bool(self._joining))
            self._send_all(sum_messages.StepSummarized.of(summary))
            self._results.put(summary)

    def _send_all(self, message: Message, sender: int = 0) -> set[int]:
        with self._lock:
            return self._members.send(message, sender)

    def _next_generation(self) -> list[Event]:
        """Start the next generation; return the losses and arrivals since the last one, none for the first."""
        self._await_change()
        now = self._reports.clock()
        with self._lock:
            self._check()
            if self._lost and not self._cluster.is_elastic:
                raise RunError(f"a worker is gone: {'; '.join(self._lost.values())}; {ALTERNATIVES}")
            events: list[Event] = [Lost(now, worker, self._lost[worker]) for worker in sorted(self._lost)]
            if self.generation:
                events += [Joined(now, worker) for worker in sorted(self._joining)]
            else:
                events += not_joined(self._cluster, {0, *self._joining}, now)
            self._members |= self._joining
            self._joining.clear()
            self._lost.clear()
            self._reports.clear()
            self._breakage = Breakage()
            self._steps = 0
            self.generation += 1
        return events

    def _announce_group(self) -> tuple[ElasticGroup, list[int]]:
        """Announce a new group to all members; return it, and the worker of each rank in it."""
        with self._lock:
            workers = [0, *sorted(self._members)]
            uses_nccl = have_own_gpus([gpu_of(self._rank.device), *self._members.gpus])
            self._store = GroupStore(self.generation, self._send_all)
            self._host = self._members.host
            previous, self.group = self.group, self._members.announce(self.generation, self._store, uses_nccl)
        if previous is not None:
            previous.abort()
            previous.close()
        return self.group, workers

    def _await_change(self) -> None:
        """Wait a moment for the report of the loss that has broken the group."""
        if not self.generation or self._joining:
            return
        with self._lock:
            is_known = self._lock.wait_for(lambda: self._lost or self._joining or self._failure, GRACE_S)
            if not is_known and (not self._cluster.is_elastic or self._breakage.is_unreachable):
                raise RunError(self._breakage.describe(self._members))

    def _expel_idle(self, timeout_s: float) -> None:
        """Expel the ranks for which all others wait, unless they wait for the network themselves."""
        self._expel(self._progress.idle(self.generation, self._steps), timeout_s)

    def _check_links(self) -> None:
        """Let all members connect once more: a link between two of them that was cut stops a sum without an error."""
        assert self.group is not None
        self._link_checks += 1
        self._send_all(sum_messages.CheckLinks(self.generation, self._link_checks))
        if reason := self.group.check_links(self._rank.transport, self._host, self._link_checks):
            self._on_broken(0, reason, is_unreachable=True)

    def _expel(self, workers: list[int], timeout_s: float) -> None:
        for worker in workers:
            if (member := self._members.get(worker)) is not None:
                self._disconnect(member, f"silent for {timeout_s:g} s")
