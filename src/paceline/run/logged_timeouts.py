"""Timeouts on silent workers as a log shows them: a run is replayed by the rule that it had, not by today's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.coordinator.failure_detector import FailureDetector
from paceline.coordinator.membership import SILENT
from paceline.coordinator.worker_table import WorkerState
from paceline.core.records import DecisionMade, GradientArrived, Record, RunEnded, TimerRang

KIND = "worker_timeout"
OF_TODAY = "median round trip"


class LoggedFailureDetector(FailureDetector):
    """Loses a worker at the very timer at which the log lost it.

    Args:
        history: of the run.
    """

    observes = True

    def __init__(self, history: Iterable[Record]) -> None:
        super().__init__()
        self._lost = deque(_lost_at_timers(history))
        self._due: dict[int, str] = {}
        self._change = ""

    def read(self, record: Record) -> None:
        """Take in the next record of the log, before its event is handled."""
        if isinstance(record, TimerRang):
            self._due = self._lost.popleft()
        elif isinstance(record, DecisionMade) and record.kind == KIND:
            self._change = record.reason

    def observe(self, worker: int, round_trip_s: float) -> str:
        """Return the change of the timeout that the log has at this arrival."""
        change, self._change = self._change, ""
        return change

    def is_due(self, now: float) -> bool:
        """Return whether the log has lost workers at this timer."""
        return bool(self._due)

    def expired(self, in_flight: Mapping[int, WorkerState], now: float) -> dict[int, str]:
        """Return these workers, and why in the words of the log."""
        return self._due

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the log is read from its beginning to its end."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stay at this place of the log."""


def is_needed(history: Iterable[Record], rules: Mapping[str, Any]) -> bool:
    """Return whether timeouts of the run, or of one that it goes on from, followed another rule than today's."""
    if "derives_timeout" not in rules:
        return True
    for record in history:  # the timeout is recorded at the first round trip
        if isinstance(record, DecisionMade) and record.kind == KIND:
            return OF_TODAY not in record.reason
        if isinstance(record, GradientArrived) and record.now_s > record.started_s:
            return False
    return False


def _lost_at_timers(history: Iterable[Record]) -> Iterator[dict[int, str]]:
    """Yield the workers that were lost at each timer, with the timeout in words."""
    lost: dict[int, str] | None = None
    for record in history:
        if isinstance(record, TimerRang | GradientArrived | RunEnded) and lost is not None:
            yield lost
            lost = None
        if isinstance(record, TimerRang):
            lost = {}
        elif lost is not None and isinstance(record, DecisionMade) and record.kind == SILENT:
            assert record.worker is not None
            lost[record.worker] = record.reason.partition(": silent for ")[2]
    if lost is not None:
        yield lost
