"""Checkpoints of the state that only one worker has: of its local optimizer, and errors of its compression."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoint.store import Checkpoints
from paceline.errors import RunError, UsageError
from paceline.recording.run_folder import WORKERS
from paceline.recording.validation import believed
from paceline.utils.files import refuse_link
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
KEEP = 3


class SavedState(NamedTuple):
    """Saved state of a worker, and its position in the run."""

    position: int
    parts: Mapping[str, Any]


class WorkerStates:
    """Checkpoints of the state that only one worker has, in the folder of the run as its process sees it.

    A worker saves beside its own process: sent to the server, each checkpoint would cost a slow network as much as an
    update. A state that cannot be saved is logged and does not end the worker, whose run can be resumed without it.

    Args:
        folder: folder of the run, as this process was given it; None for a run without one.
        worker: number of the worker, >= 0.
        counted: what positions count, in the singular.

    Attributes:
        path: folder of the checkpoints; None for a run without one.
    """

    def __init__(self, folder: str | Path | None, worker: int, counted: str) -> None:
        self._worker = worker
        self.path = None if folder is None else Path(folder) / WORKERS / str(worker)
        self._store = None if self.path is None else Checkpoints(self.path, KEEP, counted)

    def save(self, position: int, parts: Mapping[str, Any]) -> None:
        """Save the state at a position, >= 1."""
        if self._store is None:
            return
        try:
            self._refuse_links()
            self._store.save(position, {"position": position, "parts": parts})
        except (OSError, RunError, UsageError) as error:
            LOG.warning("worker %d: %s; a resumed run would begin without it", self._worker, error)

    def find(self, position: int) -> SavedState | None:
        """Return the newest state that is not after a position, None if there is none or if none can be read.

        States after it are removed: they belong to a part of the run that will be repeated, or to an earlier run.
        """
        if self._store is None:
            return None
        try:
            self._refuse_links()
            with believed(self.path, RunError):
                return self._newest(position)
        except (OSError, RunError, UsageError) as error:
            LOG.warning("worker %d cannot read its saved states: %s", self._worker, error)
            return None

    def _refuse_links(self) -> None:
        assert self.path is not None
        for folder in (self.path.parent, self.path):
            refuse_link(folder)

    def _newest(self, position: int) -> SavedState | None:
        assert self._store is not None
        if not position:
            self._store.clear()
            return None
        for path, state in self._store.whole():
            saved = SavedState(state["position"], state["parts"])
            if saved.position <= position:
                return saved
            shutil.rmtree(path)
        return None
