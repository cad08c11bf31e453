"""Log messages of a run: its workers, changes of the protocol and of the worker timeout, the end."""

from __future__ import annotations

import logging

from paceline.core.events import NO_FAILURES
from paceline.core.records import DecisionMade, MemoryShared, Record, RunEnded, WorkerJoined, WorkerLost
from paceline.recording.callback import Callback
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
COLLECTIVE = "; a collective that is left in the loop, as dist.all_reduce(loss), is a likely cause: remove it"


class RunLog(Callback):
    """Callback that logs the membership of a run.

    A lost worker is a warning where workers are real, and information where the loss is simulated.

    Args:
        is_simulated: whether the workers are simulated.
        has_loops: whether the workers run loops of the user, in which a collective waits for ranks at other steps.
    """

    def __init__(self, *, is_simulated: bool, has_loops: bool = False) -> None:
        self._if_silent = COLLECTIVE if has_loops else ""
        self._lost = logging.INFO if is_simulated else logging.WARNING

    def on_record(self, record: Record) -> None:
        """Log a record of an event that is rare."""
        match record:
            case WorkerLost():
                level = logging.INFO if record.reason in NO_FAILURES else self._lost
                advice = self._if_silent if record.silent else ""
                LOG.log(level, "lost worker %d: %s%s", record.worker, record.reason, advice)
            case WorkerJoined():
                LOG.info("worker %d joined", record.worker)
            case MemoryShared():
                LOG.info("worker %d shares memory with the server", record.worker)
            case DecisionMade(kind="worker_timeout"):
                LOG.info("worker timeout: %s", record.reason)
            case DecisionMade(kind="protocol"):
                LOG.info("protocol %s", record.reason)
            case RunEnded():
                LOG.info("the run ended: %s", record.reason)
