"""Progress of a run at the start of a worker's task."""

from __future__ import annotations

from typing import NamedTuple

from paceline.core.events import Compute
from paceline.core.gradient import StepPlace

DROPPED = "dropped"  # with the whole update, because another gradient of it is not finite


class TaskProgress(NamedTuple):
    """Progress of the run at the start of a task.

    Attributes:
        update: updates made so far, >= 0.
        workload: gradients applied so far, >= 0.
        last: what became of the previous gradient of this worker: "used", "late", "interrupted", "skipped" because its
            loop skipped the step, "not finite", or `DROPPED`; empty for the first task.
        staleness: staleness of that gradient in versions; 0 if it was not used.
        accepted: newest accepted draw of this worker; 0 for none.
        saved: newest accepted draw of this worker in the newest checkpoint of the run; 0 for none.
        step_place: place of the step whose gradient a lost worker has taken with it; None for another task.
    """

    update: int = 0
    workload: int = 0
    last: str = ""
    staleness: int = 0
    accepted: int = 0
    saved: int = 0
    step_place: StepPlace | None = None

    @classmethod
    def of(cls, command: Compute, last: str = "", staleness: int = 0, saved: int = 0) -> TaskProgress:
        """Return the progress at the start of this task."""
        return cls(
            update=command.version,
            workload=command.workload,
            last=last,
            staleness=staleness,
            accepted=command.accepted,
            saved=saved,
        )
