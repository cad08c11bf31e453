"""End of an attached run: what it raises in the loop of a rank, and what the others learn of a loop that ends."""

from __future__ import annotations

from paceline.core.events import Outcome
from paceline.engines.distributed import End
from paceline.errors import RunError, UsageError
from paceline.run.result import Result
from paceline.run.session import Session
from paceline.utils.rank_logger import RankLogger
from paceline.utils.wording import counted, first_line

LOG = RankLogger(__name__)
INTERRUPTED_STATUS = 130
LONGEST_REASON = 300  # characters


def end_of(session: Session, result: Result) -> End:
    """Return the end of a run that rank 0 or its server has recorded."""
    made, workload = session.coordinator.version, session.coordinator.workload
    return End(result.stopped_by, result.reason, result.time_s, updates=made, workload=workload)


def how_to_resume(folder: object) -> str:
    """Return how to resume the run in a folder as the end of a sentence, empty without a folder."""
    return "" if folder is None else f"; resume it with resume={str(folder)!r} in place of out="


def raise_end(end: End, leader: str, folder: object, *, returns: bool, is_first: bool) -> None:
    """Raise what the loop of a rank gets at the end of its run, if anything.

    Args:
        end: end of the run.
        leader: name of the process that has ended it.
        folder: folder of the run, None for a run without one.
        returns: whether the loop reads `stopped_by` itself, so that only an error is raised.
        is_first: whether this is rank 0, which alone says how to resume an interrupted run.

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
        if is_first:
            LOG.warning("%s%s", text, how_to_resume(folder))
        else:
            LOG.info("%s", text)
        raise SystemExit(INTERRUPTED_STATUS)


def why_left(error: BaseException) -> tuple[Outcome, str]:
    """Return the outcome of a run that ends with an error in a loop, and the error in one line.

    >>> why_left(ValueError("no such class"))
    (<Outcome.FAILED: 'failed'>, 'ValueError: no such class')
    >>> why_left(KeyboardInterrupt())
    (<Outcome.INTERRUPTED: 'interrupted'>, 'KeyboardInterrupt')
    """
    name = type(error).__name__
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return Outcome.INTERRUPTED, name
    return Outcome.FAILED, (f"{name}: {first_line(str(error))}" if str(error) else name)[:LONGEST_REASON]
