"""Reports of all ranks in one iteration, checked by what rank 0 knows of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.core.events import Compute
from paceline.engines.distributed.transport.sum_messages import StepReport, StepSummary


class StepReports:
    """Reports of one iteration, which is complete when all ranks have reported.

    Args:
        clock: returns the seconds since the run began.
        groups: number of parameter groups of the optimizer.

    Attributes:
        clock: as given.
    """

    def __init__(self, clock: Callable[[], float], groups: int) -> None:
        self.clock = clock
        self._groups = groups
        self._tasks: Mapping[int, Compute] = {}
        self._reports: dict[int, StepReport] = {}

    def expect(self, tasks: Mapping[int, Compute]) -> None:
        """Set the task of each worker in this iteration."""
        self._tasks = dict(tasks)

    def add(self, worker: int, report: StepReport) -> None:
        """Add the report of a worker."""
        self._reports[worker] = report

    def clear(self) -> None:
        """Remove all reports."""
        self._reports.clear()

    def are_of(self, count: int) -> bool:
        """Return whether this number of workers has reported."""
        return len(self._reports) >= count

    def refused(self) -> dict[int, str]:
        """Return what is wrong with the report of each worker that must not take part."""
        draws = {worker: task.draw for worker, task in self._tasks.items()}
        reasons = {worker: each.why_refused(draws.get(worker), self._groups) for worker, each in self._reports.items()}
        return {worker: reason for worker, reason in reasons.items() if reason}

    def take(self, generation: int, *, reforms: bool) -> StepSummary:
        """Remove all reports and return them; the arguments are those of `StepSummary`."""
        reports = {worker: self._reports[worker] for worker in sorted(self._reports)}
        self.clear()
        return StepSummary(generation=generation, now=self.clock(), reforms=reforms, reports=reports)
