"""Follower of the folder of a run, which another process may be writing: its data so far, and whether it still runs."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path

from paceline.core.records import RunEnded
from paceline.recording.lock import is_locked
from paceline.recording.log_tail import LogTail
from paceline.recording.run_folder import EVENTS, RUN, SavedRun, standby_folder
from paceline.watch.live_run import LiveRun

QUIET_S = 2.0  # without a record, before the lock of the folder is tested
SILENT_S = 30.0


class State(StrEnum):
    """State of a run."""

    WAITING = "waiting"
    READING = "reading"
    RUNNING = "running"
    SILENT = "silent"
    STOPPED = "stopped"
    ENDED = "ended"


class Watcher:
    """Incremental reader of a run.

    Args:
        folder: folder of the run, which need not exist yet.

    Attributes:
        folder: the same folder.
        live: data of the run; None before its first record.
        records: number of records that were read, those that no longer hold included.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.live: LiveRun | None = None
        self.records = 0
        self._tail = LogTail(folder / EVENTS)
        self._left_bytes = 0
        self._end: RunEnded | None = None
        self._written_s = time.monotonic()
        self._is_stopped = False
        self._tested_s = 0.0

    def poll(self) -> bool:
        """Read the next part of the log; return whether more is to be read at once.

        Raises:
            RunError: the log cannot be read, or a line is no record.
            UsageError: the folder has a log without a readable configuration.
        """
        new = self._tail.read()
        if new.starts_over:
            self.live = LiveRun(SavedRun(self.folder))
        if self.live is not None and new.records:
            self.live.add(new.records)
            self.records += len(new.records)
            self._end = new.records[-1] if isinstance(new.records[-1], RunEnded) else None
            is_catching_up = (
                new.starts_over or self._left_bytes > 0
            )  # otherwise the records are new, whatever the clocks
            self._written_s = time.monotonic() - (max(0.0, time.time() - new.written_s) if is_catching_up else 0.0)
            self._is_stopped = False
        is_behind = bool(new.records) and new.left_bytes > 0
        self._left_bytes = new.left_bytes if is_behind else 0
        return is_behind

    @property
    def age_s(self) -> float:
        """Seconds since the last record was written."""
        return time.monotonic() - self._written_s

    @property
    def state(self) -> State:
        """State of the run now."""
        if self._left_bytes:
            return State.READING
        if self._end is not None:
            return State.ENDED
        if (self.live is not None or (self.folder / RUN).exists()) and self._has_stopped():
            return State.STOPPED
        if self.live is None:
            return State.WAITING
        return State.SILENT if self.age_s >= SILENT_S else State.RUNNING

    def describe(self) -> str:
        """Return the state as a sentence."""
        age = "it has no record" if self.live is None else f"last record {self.age_s:.0f} s ago"
        match self.state:
            case State.WAITING:
                return f"waiting for the first record in {self.folder}"
            case State.READING:
                return f"reading the log, {self._left_bytes / 2**20:.0f} MiB left"
            case State.ENDED:
                assert self._end is not None
                return f"ended: {self._end.reason}"
            case State.STOPPED:
                return f"stopped without an end: no process of this host writes to the folder; {age}{self._successor()}"
            case State.SILENT:
                return f"no record for {self.age_s:.0f} s"
            case _:
                return f"running, {age}"

    def _successor(self) -> str:
        """Return where a standby goes on with the run, if it had one."""
        has_standby = self.live is not None and self.live.run.configuration.get("has_standby", False)
        return f"; its standby may go on in {standby_folder(self.folder)} of its host" if has_standby else ""

    def _has_stopped(self) -> bool:
        """Return whether the process of the run is gone; tested once a second at most, and only without new records."""
        now_s = time.monotonic()
        if not self._is_stopped and self.age_s >= QUIET_S and now_s - self._tested_s >= 1.0:
            self._tested_s = now_s
            try:
                self._is_stopped = not is_locked(self.folder)
            except OSError:  # the folder is gone
                self._is_stopped = True
        return self._is_stopped
