"""Callbacks of a standby, which begin when it has become the server."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.records import Record, RunResumed
from paceline.recording.callback import Callback
from paceline.recording.history import History
from paceline.recording.run_folder import RunFolder

STANDBY = "-standby"  # end of the name of its folder


class AfterTakeover(Callback):
    """Callback that passes records on once the standby has taken over; rank 0 has the same callbacks until then.

    Args:
        callbacks: receivers of the records.
        folder: folder with the records before, which a resumed callback reads; None for none.
        resumes: whether the run itself is resumed, at its beginning.
    """

    def __init__(self, callbacks: Sequence[Callback], folder: RunFolder | None, *, resumes: bool) -> None:
        self._callbacks = callbacks
        self._folder = folder
        self._restarts = 1 + resumes  # of which the last one is the takeover

    def on_record(self, record: Record) -> None:
        """Pass on a record after the takeover."""
        if isinstance(record, RunResumed):
            self._restarts -= 1
            for callback in self._callbacks if not self._restarts else ():
                callback.on_resume(self._history())
        if not self._restarts:
            for callback in self._callbacks:
                callback.on_record(record)

    def _history(self) -> History:
        if self._folder is None:
            return History(list)
        self._folder.settle()
        return self._folder.history
