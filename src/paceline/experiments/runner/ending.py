"""Outcome of a run of a comparison or a search, from its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.core.events import Outcome
from paceline.core.records import RunEnded
from paceline.core.stop import TARGETS, Stop
from paceline.recording.event_log import to_record
from paceline.recording.run_folder import ERROR, EVENTS
from paceline.utils.files import ContentError, in_unicode, open_regular, replace_file
from paceline.utils.rank_logger import RankLogger
from paceline.utils.wording import counted, first_line

LOG = RankLogger(__name__)

TAIL_BYTES = 1 << 16
MOST_CRASHES = 4  # in an error message


class Crash(NamedTuple):
    """Reason of a crashed run.

    Attributes:
        message: reason in one line.
        file: file with the traceback; None if it could not be written.
    """

    message: str
    file: Path | None = None

    def __str__(self) -> str:
        return self.message if self.file is None else f"{self.message} ({self.file})"


def is_finished(run: Path) -> bool:
    """Return whether the log of a run ends with an outcome other than an interrupt or a crash.

    A run that diverged is finished, because it would diverge again.
    """
    outcome = outcome_of(run)
    return outcome is not None and outcome is not Outcome.INTERRUPTED and not outcome.is_crash


def outcome_of(run: Path) -> Outcome | None:
    """Return the outcome in the last line of a run's log; None if the log is incomplete."""
    end = _last_line(run / EVENTS)
    if not end.startswith(b'{"event":"run_ended"'):
        return None
    record = to_record(end)
    return record.outcome if isinstance(record, RunEnded) else None


def write_crash(run: Path, message: str, details: str) -> Crash:
    """Write the reason of a crash to the folder of the run: the message in the first line, then the traceback.

    A traceback that cannot be written is logged.
    """
    crash = Crash(first_line(message), run / ERROR)
    try:
        run.mkdir(parents=True, exist_ok=True)
        replace_file(run / ERROR, in_unicode(f"{crash.message}\n\n{details or message}\n").encode())
    except OSError as error:
        LOG.error("cannot write %s (%s):\n%s", run / ERROR, error.strerror or error, details or message)
        return Crash(crash.message)
    return crash


def describe_crashes(crashes: Mapping[str, Crash], runs: int, folder: Path) -> str:
    """Return a text on the crashed runs, and how to repeat only these."""
    reasons = "; ".join(f"{run}: {crash}" for run, crash in list(crashes.items())[:MOST_CRASHES])
    more = f"; and {len(crashes) - MOST_CRASHES} more" if len(crashes) > MOST_CRASHES else ""
    return (
        f"{len(crashes)} of {counted(runs, 'run')} failed: {reasons}{more}; "
        f"repeat the same call with out={str(folder)!r} to run only these again"
    )


def describe_end(stop: Stop, outcome: Outcome, reason: str) -> str:
    """Return a text on the end of a run without a crash: it reached its target, missed it, or diverged.

    >>> describe_end(Stop(loss=0.2, seconds=60), Outcome.SECONDS, "60 seconds have passed")
    'missed loss 0.2: 60 seconds have passed'
    """
    if outcome.is_divergence:
        return f"diverged: {reason.removeprefix('training diverged: ')}"
    is_missed = stop.targets and outcome not in (*TARGETS, Outcome.INTERRUPTED)
    return f"missed {stop.goal}: {reason}" if is_missed else reason


def _last_line(path: Path) -> bytes:
    """Return the last line of a file; empty if the line is incomplete or the file does not exist."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            tail = file.read()
    except (OSError, ContentError):
        return b""  # no run has begun there
    return tail.splitlines()[-1] if tail.endswith(b"\n") else b""
