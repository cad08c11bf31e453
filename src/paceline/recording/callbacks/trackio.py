"""Scalars of a run for Trackio."""

from __future__ import annotations

from paceline.core.records import RunEnded
from paceline.recording.callbacks.project_tracker import ProjectTracker
from paceline.recording.scalars import ScalarPoint
from paceline.utils.argument_types import checked_types


@checked_types
class Trackio(ProjectTracker):
    """Callback that writes scalars for Trackio, on this machine or to a Space of Hugging Face.

    Args:
        project: name of the project.
        options: further arguments of ``trackio.init``, for example ``name="bsp"`` or ``space_id="me/runs"``.

    Raises:
        UsageError: trackio is not installed.
    """

    name = "Trackio"
    package = extra = "trackio"

    def log(self, point: ScalarPoint) -> None:
        """Log scalars."""
        self._run.log({**point.values, "time_s": point.time_s}, step=point.version)

    def finish(self, end: RunEnded | None) -> None:
        """Write what is left."""
        self._run.finish()
