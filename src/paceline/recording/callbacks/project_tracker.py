"""Base of trackers whose library has the interface of ``wandb.init``: a project has runs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from paceline.recording.callbacks.tracker import Tracker


class ProjectTracker(Tracker):
    """Callback that sends scalars to a run of a project.

    Args:
        project: name of the project.
        options: further arguments of the library's ``init``.
    """

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        self._project = project
        self._options = options
        self._run: Any = None

    def begin(self, configuration: Mapping[str, Any]) -> None:
        """Begin a run."""
        options = {"config": dict(configuration), **self._options}
        self._run = import_module(self.package).init(project=self._project, **options)
