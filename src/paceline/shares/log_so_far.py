"""Log of a balanced run as another process has left it, and its end where no rank has written one."""

from __future__ import annotations

import signal
import sys
from collections import deque
from pathlib import Path

from paceline.core.events import Outcome
from paceline.core.records import (
    DecisionMade,
    GradientArrived,
    RunEnded,
    RunResumed,
    RunStarted,
    UpdateMade,
    WorkerJoined,
    WorkerLost,
)
from paceline.errors import PacelineError
from paceline.recording.event_log import Prefix, read_records
from paceline.recording.run_folder import EVENTS, RUN, RunFolder, SavedRun
from paceline.recording.script_runs import LIMITS, REGROUPED, SCRIPT, SHARES
from paceline.recording.timed_updates import DEALT, TimedUpdates, UpdateRecords
from paceline.shares.gain import Gain
from paceline.utils.files import lines_of, open_regular

MOST_OF_AN_UPDATE = 1 << 16  # records
ENDING_RUNS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class LogSoFar:
    """Log up to the last whole update, decision or other event.

    Args:
        folder: folder of the run.
        with_end: whether the end of the run that its writer has seen is kept; else the run goes on.

    Attributes:
        folder: the same.
        now_s: time of the last record.
        gain: what the shares have gained.
        records: writer of the next updates.
        living: ranks that live.
        updates: number of updates since these ranks are together.
        decisions: number of decisions on shares since then.
        has_ended: whether the last record is the end of the run.
    """

    def __init__(self, folder: Path, *, with_end: bool) -> None:
        self.folder = folder
        last: deque[int] = deque(maxlen=MOST_OF_AN_UPDATE)
        self._size_bytes = 0
        with open_regular(folder / EVENTS) as file:
            for line in lines_of(file):
                if line.endswith(b"\n"):
                    last.append(len(line))
                    self._size_bytes += len(line)
        self.now_s = 0.0
        self.gain = Gain()
        self.records = UpdateRecords()
        self.living: set[int] = set()
        self.updates = self.decisions = 0
        self.has_ended = False
        reader, after = TimedUpdates(), 0  # records that are left out
        for record in read_records(folder / EVENTS, self._size_bytes):
            if isinstance(record, GradientArrived) or (isinstance(record, DecisionMade) and record.kind == DEALT):
                reader.add(record)
                after += 1
                continue
            if isinstance(record, RunEnded) and not with_end:
                after += 1
                continue
            after = 0
            self.now_s = record.now_s
            self.has_ended = isinstance(record, RunEnded)
            if (update := reader.add(record)) is not None:
                self.gain.add(update)
            match record:
                case UpdateMade():
                    self.records.follow(record)
                    self.updates += 1
                case RunStarted() | RunResumed():
                    self.living = set(range(record.workers))
                    self.updates = self.decisions = 0
                case WorkerLost():
                    self.living.discard(record.worker)
                case WorkerJoined():
                    self.living.add(record.worker)
                case DecisionMade(kind=kind) if kind == REGROUPED:
                    self.updates = self.decisions = 0
                case DecisionMade(kind=kind) if kind in {SHARES, LIMITS}:
                    self.decisions += 1
        self._size_bytes -= sum(last.pop() for _ in range(after))

    @property
    def prefix(self) -> Prefix:
        """Part of the log that another process continues."""
        return Prefix.of(self.folder / EVENTS, self._size_bytes)


def is_log_of(folder: Path, launch: str) -> bool:
    """Return whether a launcher has begun the log in a folder."""
    return (folder / RUN).exists() and SavedRun(folder).configuration.get(SCRIPT, {}).get("launch") == launch


def end_log(folder: Path, launch: str, status: int) -> None:
    """End the log of a launcher's run, if its ranks have not, as when a signal has killed them.

    If that is not possible, this is said.

    Args:
        folder: folder of the run.
        launch: name of the launcher's run.
        status: exit status of the launcher.
    """
    try:
        if not is_log_of(folder, launch) or (log := LogSoFar(folder, with_end=True)).has_ended:
            return
        writer = RunFolder(folder, SavedRun(folder).configuration, keep=log.prefix)
        try:
            outcome, reason = _outcome(status)
            writer.on_record(
                RunEnded(
                    now_s=log.now_s,
                    outcome=outcome,
                    reason=reason,
                    busy_s=log.records.busy_s,
                    live_s=log.records.live_s,
                )
            )
        finally:
            writer.close()
    except (PacelineError, OSError) as error:
        print(f"paceline: the log of the run has no end: {error}", file=sys.stderr, flush=True)


def _outcome(status: int) -> tuple[Outcome, str]:
    """Return how a run has ended, from the exit status of its launcher.

    >>> _outcome(143)
    (<Outcome.INTERRUPTED: 'interrupted'>, 'SIGTERM')
    >>> _outcome(1)
    (<Outcome.FAILED: 'failed'>, 'exit status 1')
    """
    for number in ENDING_RUNS:
        if status == 128 + number:
            return Outcome.INTERRUPTED, number.name
    return (Outcome.FAILED, f"exit status {status}") if status else (Outcome.STOPPED, "the script has ended")
