"""Membership client: every rank other than 0 in an all-reduce run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from paceline.core.events import Compute
from paceline.engines.distributed.allreduce.base import GroupMembership
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup, MembershipChanged, Unreachable
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.handshake import RunFinished
from paceline.engines.distributed.rendezvous.rendezvous import join_rank_0
from paceline.engines.distributed.rendezvous.session import ClientSession, describe_process, raising_run_error
from paceline.engines.distributed.transport import messages, sum_messages
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.process_group import PendingCollective
from paceline.engines.distributed.transport.task_messages import decoded_metrics
from paceline.worker.task_runner import gpu_of


class AnnouncedGroup(NamedTuple):
    """Group that rank 0 has announced.

    Attributes:
        generation: number of the group.
        group: the group, to which this process connects in its main thread.
        store: its store, into which keys are put as they arrive.
    """

    generation: int
    group: ElasticGroup
    store: GroupStore


class MembershipClient(GroupMembership):
    """Counterpart of `MembershipServer` at every other rank: joins the groups that rank 0 forms.

    Args:
        rank: settings of this process.
        job_spec: settings that must be equal on all processes.
    """

    def __init__(self, rank: Rank, job_spec: dict[str, Any]) -> None:
        super().__init__()
        self._rank = rank
        self._job_spec = job_spec
        self._messages: queue.SimpleQueue[
            sum_messages.StepSummarized | sum_messages.MetricsMeasured | AnnouncedGroup | Exception
        ] = queue.SimpleQueue()
        self._announced: AnnouncedGroup | None = None  # group that this process has not joined yet
        self._newest: AnnouncedGroup | None = None  # group that rank 0 has announced last
        self._session: ClientSession | None = None

    def open(self) -> None:
        """Join rank 0."""
        cluster = self._rank.cluster
        gpu = gpu_of(self._rank.device)
        name = describe_process(f"worker {cluster.worker}", cluster)
        hello = messages.Hello.of(name, cluster.worker, self._job_spec, gpu=gpu)
        with raising_run_error():
            self._session = join_rank_0(cluster, self._rank.transport, hello)
        self._session.listen(self._on_message, self._on_error)

    def form(self, make_state: object, timeout_s: float) -> dict[str, Any]:
        """Join the next group, and return the state from which it starts."""
        while True:
            announced = self._newest_announced()
            self._steps = 0
            self.generation = announced.generation
            previous, self.group = self.group, announced.group
            if previous is not None:
                previous.abort()
                previous.close()
            try:
                self.group.connect(self._rank.transport, self._host)
                return self.group.broadcast_state(None)
            except ConnectionLost as error:
                self._report_broken(error)

    def report(self, report: sum_messages.StepReport, tasks: Mapping[int, Compute]) -> None:
        """Send the report of this rank."""
        self._send(report)
        self._steps += 1

    def summary(self, timeout_s: float) -> sum_messages.StepSummary:
        """Wait for the reports of all ranks."""
        while True:
            message = self._next_message()
            if isinstance(message, sum_messages.StepSummarized) and message.generation == self.generation:
                return message.decoded(self._rank.cluster.n)

    def wait(self, pending: list[PendingCollective], timeout_s: float) -> None:
        """Wait for sums."""
        assert self.group is not None
        with self._raising_membership_changed():
            self.group.wait(pending)

    def metrics(self, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Wait for the metrics that rank 0 has measured."""
        while True:
            message = self._next_message()
            if isinstance(message, sum_messages.MetricsMeasured) and message.generation == self.generation:
                return decoded_metrics(message.metrics)

    def is_over(self) -> bool:
        """Wait until rank 0 has ended the run too, or forms a new group to continue."""
        self._announced = self._newest_announced()
        return False

    def leave(self, reason: str) -> None:
        """Leave the run alone, and wait until rank 0 closes the connection."""
        assert self._session is not None
        self._session.leave(reason)

    def close(self, end: messages.End, error: BaseException | None = None) -> None:
        """Report the error to rank 0 if there is one, and close the connection and the group."""
        if self._session is not None:
            if isinstance(error, Exception):
                self._session.fail(error)
            self._session.close()
            self._session = None
        self._close_group(end)

    # --- inside -------------------------------------------------------------------------------------------

    @contextmanager
    def _raising_membership_changed(self) -> Iterator[None]:
        try:
            yield
        except ConnectionLost as error:
            self._report_broken(error)
            self._announced = self._newest_announced()
            raise MembershipChanged from error

    def _report_broken(self, error: ConnectionLost) -> None:
        self._send(sum_messages.GroupBroken(self.generation, str(error), isinstance(error, Unreachable)))

    def _send(self, message: Message) -> None:
        assert self._session is not None
        self._session.connection.send(message)

    @property
    def _host(self) -> str:
        assert self._session is not None
        return self._session.connection.local_host

    def _newest_announced(self) -> AnnouncedGroup:
        """Wait for a group to join; of several that came while this process was busy, the last one."""
        while self._announced is None or not self._messages.empty():
            with suppress(MembershipChanged):
                self._next_message()
        announced, self._announced = self._announced, None
        return announced

    def _next_message(self) -> sum_messages.StepSummarized | sum_messages.MetricsMeasured:
        message = self._messages.get()
        if isinstance(message, Exception):
            raise message
        if isinstance(message, AnnouncedGroup):
            self._announced = message
            raise MembershipChanged
        return message

    # --- in the thread of the sockets ---------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        match message:
            case sum_messages.StepSummarized() | sum_messages.MetricsMeasured():
                self._messages.put(message)
            case sum_messages.FormGroup():
                self._announce(message)
            case sum_messages.StoreKey():
                if self._newest is not None:
                    self._newest.store.put(message)
            case sum_messages.ProgressRequest():
                is_summing = self.group is not None and self.group.is_waiting
                self._send(sum_messages.Progress(self.generation, self._steps, is_summing))
            case sum_messages.CheckLinks():
                # The check waits for keys of the other members, which arrive in this thread.
                threading.Thread(target=self._check_links, args=(message, self._newest), daemon=True).start()
            case messages.End() as end:
                if end.has_failed:
                    self._abort_newest()
                elif self._newest is not None:
                    self._newest.group.complete()
                self._messages.put(RunFinished(end))

    def _on_error(self, error: Exception) -> None:
        self._abort_newest()
        self._messages.put(error)

    def _announce(self, form: sum_messages.FormGroup) -> None:
        """Let this process join a group, whose keys may arrive before it does."""
        self._abort_newest()
        store = GroupStore(form.generation, self._send)
        group = ElasticGroup(form.key, form.rank, form.size, store, uses_nccl=form.uses_nccl)
        self._newest = AnnouncedGroup(form.generation, group, store)
        self._messages.put(self._newest)

    def _abort_newest(self) -> None:
        """Abort the group, which is out of date, so that no member waits for this process in it."""
        if self._newest is not None:
            self._newest.group.abort()

    # --- in a thread of its own ---------------------------------------------------------------------------

    def _check_links(self, message: sum_messages.CheckLinks, announced: AnnouncedGroup | None) -> None:
        if announced is None or announced.generation != message.generation:
            return
        reason = announced.group.check_links(self._rank.transport, self._host, message.number)
        if reason:
            self._send(sum_messages.GroupBroken(message.generation, reason, is_unreachable=True))
