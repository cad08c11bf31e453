"""Base of experiment trackers: scalars go to a library in a thread, whose failures do not reach the run."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any, ClassVar

from paceline.core.records import Record, RunEnded, UpdateMade
from paceline.errors import UsageError
from paceline.recording.callback import Callback, RunInfo
from paceline.recording.scalars import ScalarPoint, Scalars
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
UPDATE_INTERVAL_S = 1.0  # between the scalars of two updates
MAX_WAITING = 1000  # points that wait for a tracker which does not answer
CLOSE_TIMEOUT_S = 30.0


def warn_of_failure(name: str, error: BaseException) -> None:
    """Log the failure of a tracker, in its `except` block."""
    LOG.warning("%s failed (%s: %s): the run continues without it", name, type(error).__name__, error)
    LOG.debug("traceback of %s", name, exc_info=True)


class Tracker(Callback):
    """Callback that sends scalars to an experiment tracker.

    Of the updates, at most one per second is sent, and the last one; evaluations are always sent. The step is the
    version. A thread calls the library. If the library fails, the failure is logged and the run continues without it.

    Attributes:
        name: name of the library in messages.
        package: name of the library when it is imported.
        extra: extra of paceline that installs it.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    extra: ClassVar[str]

    def __init__(self) -> None:
        if find_spec(self.package) is None:
            raise UsageError(f"{self.package} is not installed; run: pip install 'paceline[{self.extra}]'")
        self._thread: threading.Thread | None = None

    @abstractmethod
    def begin(self, configuration: Mapping[str, Any]) -> None:
        """Begin a run of the tracker, in its thread.

        Args:
            configuration: configuration of the run, as in ``run.json``.
        """

    @abstractmethod
    def log(self, point: ScalarPoint) -> None:
        """Send scalars, in the tracker's thread."""

    @abstractmethod
    def finish(self, end: RunEnded | None) -> None:
        """End the run of the tracker, in its thread.

        Args:
            end: end of the run; None if an error has ended it.
        """

    def on_start(self, run: RunInfo) -> None:
        """Start the thread."""
        self._scalars = Scalars()
        self._points: SimpleQueue[ScalarPoint | None] = SimpleQueue()
        self._next_s = 0.0  # on the monotonic clock, before which no update is sent
        self._unsent: UpdateMade | None = None
        self._end: RunEnded | None = None
        self._has_failed = False
        self._left_out = 0
        self._thread = threading.Thread(
            target=self._send_all, args=(run.configuration,), name=f"paceline-{self.package}", daemon=True
        )
        self._thread.start()

    def on_resume(self, history: Iterable[Record]) -> None:
        """Count the earlier records, whose scalars the tracker has."""
        for record in history:
            self._scalars.add(record)

    def on_record(self, record: Record) -> None:
        """Send the scalars of an evaluation, and of an update after each interval."""
        self._scalars.add(record)
        match record:
            case UpdateMade():
                self._unsent = record
                if time.monotonic() < self._next_s:
                    return
                self._next_s = time.monotonic() + UPDATE_INTERVAL_S
                self._unsent = None
            case RunEnded():
                self._end = record
                if self._unsent is not None:
                    self._put(self._scalars.of(self._unsent))
        self._put(self._scalars.of(record))

    def close(self) -> None:
        """Wait until the tracker has taken everything, at most for a time."""
        if self._thread is None:
            return
        self._points.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            LOG.warning("%s has not ended within %g s: its last scalars may be missing", self.name, CLOSE_TIMEOUT_S)
        elif self._left_out:
            LOG.warning("%s was too slow: %d of its scalars are missing", self.name, self._left_out)
        self._thread = None

    def _put(self, point: ScalarPoint | None) -> None:
        if point is None or self._has_failed:
            return
        if self._points.qsize() >= MAX_WAITING:
            self._left_out += 1
            return
        self._points.put(point)

    def _send_all(self, configuration: Mapping[str, Any]) -> None:
        try:
            self.begin(configuration)
            while (point := self._points.get()) is not None:
                self.log(point)
            self.finish(self._end)
        except BaseException as error:  # also SystemExit and CancelledError: nothing else handles them in a thread
            self._has_failed = True
            warn_of_failure(self.name, error)
