"""Errors of workers at rank 0, which records why each one has failed."""

from __future__ import annotations

from pathlib import Path

from paceline.engines.distributed.transport.messages import Failed
from paceline.errors import UsageError
from paceline.recording.whole_texts import WholeTexts
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


def why_failed(failed: Failed, worker: int, folder: str | Path | None) -> str:
    """Log and return why a worker has failed, short and printable.

    Args:
        failed: last message of the worker.
        worker: number of the worker.
        folder: folder of the run, for a text that is too long; None without one.

    Raises:
        UsageError: the user has to change something.
    """
    reason = WholeTexts(folder).shortened(failed.whole, f"worker-{worker}")
    if failed.is_usage:
        raise UsageError(reason)
    LOG.error("worker %d failed: %s; its own log has the traceback", worker, reason)
    return reason
