"""End of an attached run: what it raises in the loop of a rank, and what the others learn of a loop that ends."""

from __future__ import annotations

import logging

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import Outcome
from paceline.engines.distributed import End
from paceline.errors import RunError, UsageError
from paceline.run.config import RunConfig
from paceline.run.result import Result
from paceline.run.session import Session
from paceline.utils.rank_logger import RankLogger
from paceline.utils.wording import counted

LOG = RankLogger(__name__)
INTERRUPTED_STATUS = 130


def end_of(session: Session, result: Result) -> End:
    """Return the end of a run that rank 0 or its server has recorded."""
    made, workload = session.coordinator.version, session.coordinator.workload
    return End(result.stopped_by, result.reason, result.time_s, updates=made, workload=workload)


def how_to_resume(config: RunConfig) -> str:
    """Return how to resume a run, as the end of a sentence of rank 0; empty on other ranks, and without a folder."""
    return (
        f"; resume it with resume={str(config.folder)!r} in place of out=" if _tells(config) and config.folder else ""
    )


def _tells(config: RunConfig) -> bool:
    """Return whether this is rank 0 of the launcher, which alone says how a run has ended."""
    assert isinstance(config.cluster, Torchrun)
    return not config.cluster.ranks.launch_rank


def raise_end(end: End, leader: str, config: RunConfig, *, returns: bool) -> None:
    """Raise what the loop of a rank gets at the end of its run, if anything.

    Args:
        end: end of the run.
        leader: name of the process that has ended it.
        config: configuration of the run on this rank.
        returns: whether the loop reads `stopped_by` itself, so that only an error is raised.

    Raises:
        UsageError: the run has failed, and the user has to change something.
        RunError: the run has failed, or training diverged.
        SystemExit: the run was interrupted.
    """
    if end.has_failed:
        raise (UsageError if end.is_usage else RunError)(f"{leader}: {end.reason}")
    outcome = Outcome(end.outcome)
    if returns:
        return
    if outcome.is_failure:
        raise RunError(
            f"{leader}: {end.reason}; pl.attach(..., on_end='return') lets the loop continue after such an end"
        )
    if outcome is Outcome.INTERRUPTED:
        text = f"the run ended after {counted(end.updates, 'update')}: {end.reason}"
        LOG.log(logging.WARNING if _tells(config) else logging.INFO, "%s%s", text, how_to_resume(config))
        raise SystemExit(INTERRUPTED_STATUS)
