"""Source of the tasks of a rank, which its loader reads epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from math import inf

from paceline.user_loop.data.epoch_cursor import EpochCursor
from paceline.user_loop.worker.exchange import LoopTask


class TaskSource:
    """Source of the tasks that a loop gets from its run.

    Args:
        begin: begins the run, unless it has begun.
        settle: settles a task whose batches were used without a step, and sets the next one.
        wait: hands a task back that has no batch for the loop, and sets the next one.

    Attributes:
        task: task of this rank, None before the first one, within a pause, and after the end.
        taken: newest task of which the loop has taken a batch.
        over: whether no task follows.
    """

    def __init__(
        self,
        begin: Callable[[], None],
        settle: Callable[[LoopTask], None],
        wait: Callable[[LoopTask], None],
    ) -> None:
        self._begin = begin
        self._settle = settle
        self._wait = wait
        self._cursor = EpochCursor()
        self.task: LoopTask | None = None
        self.taken: LoopTask | None = None
        self.over = False
        self._last_workload = inf
        self._are_dealt = False

    def expect_end(self, last_workload: float, *, are_dealt: bool) -> None:
        """Let a loop with several optimizers begin no iteration without a batch.

        Args:
            last_workload: workload at which the run ends; inf if it is not known.
            are_dealt: whether batches are dealt, so that none is left for a task without one.
        """
        self._last_workload = last_workload
        self._are_dealt = are_dealt

    def end(self) -> None:
        """Give no further task."""
        self.over = True
        self.task = None

    def name_epoch(self, epoch: int) -> None:
        """Give tasks until the end of this epoch."""
        self._cursor.name(epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Give tasks until the end of this epoch, or of that of the present task if it is a later one."""
        self._cursor.name(epoch if self.task is None else max(epoch, self.task.epoch))

    def begin_iteration(self) -> None:
        """Begin the run with the first iteration, and the next epoch if the loop does not name it."""
        self._begin()
        if self.task is not None:
            self._cursor.begin_iteration(self.task.epoch)

    def next_task(self) -> LoopTask | None:
        """Return the task of this rank, None if it is of a later epoch or the run is over."""
        return self.task if self.task is not None and self.task.epoch <= self._cursor.epoch else None

    def take(self) -> LoopTask | None:
        """Return the task whose batches the loop takes now, None if it is of a later epoch or the run is over."""
        while (task := self.next_task()) is not None and self._has_none(task):
            self._wait(task)
        self.taken = task or self.taken
        return task

    def _has_none(self, task: LoopTask) -> bool:
        """Return whether a task is only for further steps with the batch that the loop has."""
        return task.progress.workload >= self._last_workload or (self._are_dealt and task.minibatch is None)

    def steps(self, iterating: Callable[[], AbstractContextManager[None]]) -> Iterator[int]:
        """Yield the numbers of the steps of a loop that has no loader, until the run is over.

        Args:
            iterating: returns the context of each step.
        """
        for number in count():
            task = self.take()
            if task is None:
                return
            with iterating():
                yield number
            if self.task is task and task.is_interrupted:
                self._settle(task)

    def check(self) -> None:
        """Check that the present task goes on.

        Raises:
            Interrupted: the protocol has interrupted it.
        """
        if self.task is not None:
            self.task.check()

    def settle_without_step(self, task: LoopTask) -> None:
        """Settle a task whose batches were used without a step: it is interrupted, or the loop has skipped the step.

        Raises:
            RunError: the gradient is finite, or the loop has taken a batch ahead.
        """
        self._settle(task)
