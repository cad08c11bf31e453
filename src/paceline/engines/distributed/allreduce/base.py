"""Membership of an all-reduce run: the interface that rank 0 and the other ranks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from paceline.core.events import Compute, Event
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup
from paceline.engines.distributed.transport.messages import End
from paceline.engines.distributed.transport.process_group import PendingCollective
from paceline.engines.distributed.transport.sum_messages import StepReport, StepSummary
from paceline.tensors.flat_buffers import FlatBuffers

MakeState = Callable[[list[Event]], dict[str, Any]]


class GroupMembership(ABC):
    """Groups of a run and their reports, as one rank takes part in them.

    All methods but `open` and `close` raise MembershipChanged when a new group has to be formed, RunFinished when rank
    0 has ended the run, and RunError when the run cannot continue.

    Attributes:
        generation: number of the group, counted from 1.
        group: current group; None before the first one.
    """

    def __init__(self) -> None:
        self._steps = 0  # reports and sums that were begun in this group
        self.generation = 0
        self.group: ElasticGroup | None = None

    @abstractmethod
    def open(self) -> None:
        """Connect this rank.

        Raises:
            UsageError: the ranks have different jobs.
            RunError: a rank did not join.
        """

    @abstractmethod
    def form(self, make_state: MakeState, timeout_s: float) -> dict[str, Any]:
        """Form a group, and return the state from which it starts.

        Args:
            make_state: at rank 0, returns the state, given the events that have led to the new group.
            timeout_s: seconds for which rank 0 waits for ranks that still compute.
        """

    def begin_sum(self, vectors: FlatBuffers) -> list[PendingCollective]:
        """Start to sum vectors in place; return the operations to wait for."""
        assert self.group is not None
        self._steps += 1
        with self._raising_membership_changed():
            return self.group.begin_sum(vectors)

    def begin_gather(self, message: Tensor) -> tuple[Tensor, list[PendingCollective]]:
        """Start to send a message to all ranks; return the memory of all messages, and the operations to wait for."""
        assert self.group is not None
        self._steps += 1
        with self._raising_membership_changed():
            return self.group.begin_gather(message)

    @abstractmethod
    def wait(self, pending: list[PendingCollective], timeout_s: float) -> None:
        """Wait for sums; after each timeout, rank 0 expels the ranks that do not take part."""

    @abstractmethod
    def report(self, report: StepReport, tasks: Mapping[int, Compute]) -> None:
        """Send the report of this rank.

        Args:
            report: the report.
            tasks: task of each worker in this iteration.
        """

    @abstractmethod
    def summary(self, timeout_s: float) -> StepSummary:
        """Wait for the reports of all ranks; rank 0 expels ranks that are silent longer than the timeout."""

    @abstractmethod
    def metrics(self, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return the metrics that rank 0 measures."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the run is over when this rank has reached its end; other ranks wait for rank 0."""

    @abstractmethod
    def close(self, end: End, error: BaseException | None = None) -> None:
        """Disconnect this rank and release all resources.

        Args:
            end: end of the run, which rank 0 sends to all other ranks.
            error: error of this rank, which other ranks report to rank 0.
        """

    @abstractmethod
    def _raising_membership_changed(self) -> AbstractContextManager[None]:
        """Raise MembershipChanged where the connection to a member is lost."""

    def _close_group(self, end: End) -> None:
        if self.group is not None:
            if end.has_failed:  # at a normal end, other ranks may still be summing
                self.group.abort()
            self.group.close()
        self.group = None
