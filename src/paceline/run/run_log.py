"""Log messages of a run: lost and joined workers, changes of the protocol and of the worker timeout, the end."""

from __future__ import annotations

import logging

from paceline.core.events import NO_FAILURES
from paceline.core.records import DecisionMade, Record, RunEnded, WorkerJoined, WorkerLost
from paceline.recording.callback import Callback
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class RunLog(Callback):
    """Callback that logs the membership of a run.

    A lost worker is a warning where workers are real, and information where the loss is simulated.

    Args:
        is_simulated: whether the workers are simulated.
    """

    def __init__(self, *, is_simulated: bool) -> None:
        self._lost = logging.INFO if is_simulated else logging.WARNING

    def on_record(self, record: Record) -> None:
        """Log a record of an event that is rare."""
        match record:
            case WorkerLost():
                level = logging.INFO if record.reason in NO_FAILURES else self._lost
                LOG.log(level, "lost worker %d: %s", record.worker, record.reason)
            case WorkerJoined():
                LOG.info("worker %d joined", record.worker)
            case DecisionMade(kind="worker_timeout"):
                LOG.info("worker timeout: %s", record.reason)
            case DecisionMade(kind="protocol"):
                LOG.info("protocol %s", record.reason)
            case RunEnded():
                LOG.info("the run ended: %s", record.reason)
