"""Restarts of the worker beside rank 0, whose process no launcher knows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline.clusters.rank_restarts import MOST_FAILURES, WORK_S, RankRestarts, Return, pause_s
from paceline.engines.distributed.rendezvous.sidecar import Sidecar
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
FIRST_PAUSE_S = 1.0
PAUSE = "paceline-sidecar-pause"  # name of its thread


class SidecarRestarts:
    """Process of a worker beside rank 0, which is started again when it is lost, as a launcher does it with a rank.

    Args:
        start: function that starts a process.
        max_restarts: number of times that the worker is started again, >= 0; -1 for no limit.
        on_due: called in another thread when the worker is to be started again.
    """

    def __init__(self, start: Callable[[], Sidecar], max_restarts: int, on_due: Callable[[], None]) -> None:
        self._start = start
        self._restarts = RankRestarts(max_restarts)
        self._on_due = on_due
        self._losses = self._failures = 0  # in a row, each before the process had worked for `WORK_S`
        self._has_worked = False
        self._pause: threading.Timer | None = None
        self._started_s = time.monotonic()
        self._process = start()

    def start_again(self) -> None:
        """Start a process after the pause, in place of the lost one, which is killed if it has not exited."""
        if self._pause is None:
            return
        self._pause = None
        self._process.stop(0.0)
        is_failure = (self._process.status or 0) > 0 and not self._has_worked
        self._failures = self._failures + 1 if is_failure else 0
        if self._failures == MOST_FAILURES:
            LOG.error("the worker beside rank 0 has failed %d times in a row, and is left out", MOST_FAILURES)
            return
        self._started_s = time.monotonic()
        self._process = self._start()

    def check(self) -> None:
        """Raise a RunError if the process has ended before it took part."""
        self._process.check()

    def on_lost(self, worker: int) -> None:
        """Begin the pause, unless the worker was started often enough."""
        if self._restarts.after_loss(worker, others_go_on=True) is Return.WITHOUT:
            return
        self._has_worked = time.monotonic() - self._started_s >= WORK_S
        self._losses = 1 if self._has_worked else self._losses + 1
        pause = pause_s(self._losses, FIRST_PAUSE_S)
        LOG.warning("worker %d, beside rank 0, is started again in %g s", worker, pause)
        self._pause = threading.Timer(pause, self._on_due)
        self._pause.name = PAUSE
        self._pause.start()

    def end_pause(self) -> None:
        """Start no process after the pause: the worker has come back by itself, or the run ends."""
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.cancel()
            pause.join()

    def stop(self) -> None:
        """Wait for the process to exit; kill it after a timeout."""
        self._process.stop()
