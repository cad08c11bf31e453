"""Membership client: every rank other than 0 in an all-reduce run."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any

import torch

from paceline.engines.distributed.allreduce.base import GroupMembership
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup, MembershipChanged, Unreachable
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.handshake import RunFinished
from paceline.engines.distributed.rendezvous.rendezvous import find_rank_0
from paceline.engines.distributed.rendezvous.session import ClientSession, describe_process, raising_run_error
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.connection import ConnectionLost, Message
from paceline.engines.distributed.transport.process_group import PendingCollective


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
            messages.StepSummary | messages.FormGroup | messages.MetricsMeasured | Exception
        ] = queue.SimpleQueue()
        self._form: messages.FormGroup | None = None
        self._session: ClientSession | None = None
        self._newest: float = 0  # newest generation that rank 0 has formed; inf when there will be no other

    def open(self) -> None:
        """Join rank 0."""
        cluster = self._rank.cluster
        self._rank_0 = find_rank_0(cluster, self._rank.transport)
        has_own_gpu = cluster.has_gpu_each(torch.cuda.device_count())
        name = describe_process(f"worker {cluster.worker}", cluster)
        hello = messages.Hello(name, cluster.worker, self._job_spec, has_own_gpu=has_own_gpu)
        with raising_run_error():
            self._session = ClientSession.connect(self._rank_0, cluster, hello)
        self._session.listen(self._on_message, self._on_error)

    def form(self, make_state: object, timeout_s: float) -> dict[str, Any]:
        """Join the next group, and return the state from which it starts."""
        while True:
            form = self._newest_form()
            self._steps = 0
            self.generation = form.generation
            if self.group is not None:
                self.group.abort()
                self.group.close()
            try:
                group = self.group = ElasticGroup(form.key, form.rank, form.size, uses_nccl=form.uses_nccl)
                if self._newest != form.generation:  # `_abort_group` may have missed this group
                    continue
                group.connect(self._rank_0)
                return group.broadcast_state(None)
            except ConnectionLost as error:
                self._report_broken(error)

    def report(self, report: messages.StepReport) -> None:
        """Send the report of this rank."""
        self._send(report, will_be_answered=True)
        self._steps += 1

    def summary(self, timeout_s: float) -> messages.StepSummary:
        """Wait for the reports of all ranks."""
        while True:
            message = self._next_message()
            if isinstance(message, messages.StepSummary) and message.generation == self.generation:
                return message

    def wait(self, pending: list[PendingCollective], timeout_s: float) -> None:
        """Wait for sums."""
        assert self.group is not None
        with self._raising_membership_changed():
            self.group.wait(pending)

    def metrics(self, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Wait for the metrics that rank 0 has measured."""
        while True:
            message = self._next_message()
            if isinstance(message, messages.MetricsMeasured) and message.generation == self.generation:
                return message.metrics

    def is_over(self) -> bool:
        """Wait until rank 0 has ended the run too, or forms a new group to continue."""
        self._form = self._newest_form()
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
            self._form = self._newest_form()
            raise MembershipChanged from error

    def _report_broken(self, error: ConnectionLost) -> None:
        self._send(messages.GroupBroken(self.generation, str(error), isinstance(error, Unreachable)))

    def _send(self, message: messages.ControlMessage, *, will_be_answered: bool = False) -> None:
        assert self._session is not None
        self._session.connection.send(message, will_be_answered=will_be_answered)

    def _newest_form(self) -> messages.FormGroup:
        """Wait for a group to join; of several that came while this process was busy, the last one."""
        while self._form is None or not self._messages.empty():
            with suppress(MembershipChanged):
                self._next_message()
        form, self._form = self._form, None
        return form

    def _next_message(self) -> messages.StepSummary | messages.MetricsMeasured:
        message = self._messages.get()
        if isinstance(message, Exception):
            raise message
        if isinstance(message, messages.FormGroup):
            self._form = message
            raise MembershipChanged
        return message

    def _on_message(self, message: Message) -> None:
        match message:
            case messages.StepSummary():
                assert self._session is not None
                self._session.connection.release_sent()
                self._messages.put(message)
            case messages.MetricsMeasured():
                self._messages.put(message)
            case messages.FormGroup(generation):
                self._abort_group(generation)
                self._messages.put(message)
            case messages.ProgressRequest():
                is_summing = self.group is not None and self.group.is_waiting
                self._send(messages.Progress(self.generation, self._steps, is_summing))
            case messages.End() as end:
                if end.has_failed:
                    self._abort_group(inf)
                elif self.group is not None:
                    self.group.complete()
                self._messages.put(RunFinished(end))

    def _on_error(self, error: Exception) -> None:
        self._abort_group(inf)
        self._messages.put(error)

    def _abort_group(self, newest: float) -> None:
        """Abort the group, which is out of date, so that no member waits for this process in it."""
        self._newest = newest
        if self.group is not None:
            self.group.abort()
