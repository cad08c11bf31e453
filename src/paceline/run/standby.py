"""Callbacks of a standby, which begin when it has become the server."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.records import Record, RunEnded, RunResumed
from paceline.errors import UsageError
from paceline.recording.callback import Callback, RunInfo
from paceline.recording.history import History
from paceline.recording.run_folder import RunFolder
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class AfterTakeover(Callback):
    """Callback that passes records on once the standby has taken over; rank 0 has the same callbacks until then.

    Args:
        callbacks: receivers of the records.
        folder: folder with the records before, which a resumed callback reads; None for none.
        resumes: whether the run itself is resumed, at its beginning.
    """

    def __init__(self, callbacks: Sequence[Callback], folder: RunFolder | None, *, resumes: bool) -> None:
        self._waiting = callbacks
        self._started: list[Callback] = []
        self._folder = folder
        self._restarts = 1 + resumes  # of which the last one is the takeover

    def on_start(self, run: RunInfo) -> None:
        """Keep the run for the takeover."""
        self._run = run

    def on_record(self, record: Record) -> None:
        """Pass on a record after the takeover."""
        if isinstance(record, RunResumed):
            self._restarts -= 1
            if not self._restarts and self._folder is not None:
                LOG.warning("the run goes on in %s", self._folder.path)
            for callback in self._waiting if not self._restarts else ():
                self._start(callback)
        for callback in self._started:
            callback.on_record(record)
        if isinstance(record, RunEnded) and not self._restarts:
            LOG.warning("the run ended: %s", record.reason)  # the standard output of this process is not shown

    def close(self) -> None:
        """Close the callbacks that have started."""
        for callback in self._started:
            callback.close()

    def _start(self, callback: Callback) -> None:
        """Start a callback; the run goes on without one that cannot start on this host, as where its port is taken."""
        try:
            callback.on_start(self._run)
        except UsageError as error:
            LOG.warning("%s is left out after the takeover: %s", type(callback).__name__, error)
            return
        self._started.append(callback)
        callback.on_resume(self._history())

    def _history(self) -> History:
        if self._folder is None:
            return History(list)
        self._folder.settle()
        return self._folder.history
