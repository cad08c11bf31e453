"""Learning-rate scheduler of torch, stepped by workload."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.errors import UsageError
from paceline.jobs.job import Job
from paceline.utils.state_dict import Stateful
from paceline.utils.user_code import at_place


class WorkloadScheduler(Stateful):
    """Learning-rate scheduler that is stepped by accepted gradients, not by updates.

    Args:
        job: job with the scheduler, or without one.
        optimizer: optimizer whose learning rates are scheduled.
        per_epoch: gradients of one epoch, None for data without length.
        workers: workers at the start of the run, >= 1; the unit of schedule_unit="update".

    Attributes:
        workload: gradients accepted so far.

    Raises:
        UsageError: the scheduler needs a metric, or epochs that the data do not have.
    """

    _saved = ("workload", "scheduled")
    _parts = ("scheduler",)

    def __init__(self, job: Job, optimizer: torch.optim.Optimizer, per_epoch: float | None, workers: int) -> None:
        self.workload = 0
        self._job = job
        self._scheduled = 0
        self._per_step = job.gradients_per_schedule_step(per_epoch, workers)
        with at_place(f"the scheduler of job {job.name} could not be made"):
            self._scheduler = job.scheduler(optimizer) if job.scheduler is not None else None
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise UsageError(
                f"job {job.name}: ReduceLROnPlateau needs a metric, which a schedule by workload does not have; "
                "give another scheduler"
            )
        if self._scheduler is not None and self._per_step is None:
            raise UsageError(f"job {job.name}: these data have no epochs to schedule by; give schedule_unit='gradient'")

    def advance(self, gradients: int) -> None:
        """Count the gradients of an update, and step the scheduler as often as it is due."""
        self.workload += gradients
        if self._scheduler is None or self._per_step is None:
            return
        due = self.workload // self._per_step
        for _ in range(due - self._scheduled):
            with at_place(f"the scheduler of job {self._job.name} failed after {self.workload} gradients"):
                self._scheduler.step()
        self._scheduled = due

    def advance_to(self, workload: int) -> None:
        """Advance to this workload, unless the schedule is further."""
        if workload > self.workload:
            self.advance(workload - self.workload)
