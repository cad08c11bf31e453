"""Scalars of a run for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.records import RunEnded
from paceline.recording.callbacks.project_tracker import ProjectTracker
from paceline.recording.scalars import ScalarPoint
from paceline.utils.argument_types import checked_types

STEP = "version"


@checked_types
class Wandb(ProjectTracker):
    """Callback that sends scalars to Weights & Biases.

    Args:
        project: name of the project.
        options: further arguments of ``wandb.init``, for example ``name="bsp"`` or ``mode="offline"``. To continue the
            run of a resumed run, give its ``id`` and ``resume="allow"``.

    Raises:
        UsageError: wandb is not installed.
    """

    name = "Weights & Biases"
    package = extra = "wandb"

    def begin(self, configuration: Mapping[str, Any]) -> None:
        """Begin a run whose step is the version."""
        super().begin(configuration)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, point: ScalarPoint) -> None:
        """Log scalars; evaluations may be of an earlier version, so that the step is a scalar too."""
        self._run.log({**point.values, STEP: point.version, "time_s": point.time_s})

    def finish(self, end: RunEnded | None) -> None:
        """Send what is left, and the outcome."""
        self._run.finish(exit_code=int(end is None or end.outcome.is_failure))
