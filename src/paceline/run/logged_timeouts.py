"""Failure detector of a replay: it reproduces the timeouts in the log of an older run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.coordinator.failure_detector import FailureDetector
from paceline.coordinator.membership import SILENT
from paceline.coordinator.worker_table import WorkerState
from paceline.core.records import DecisionMade, GradientArrived, Record, RunEnded, TimerRang

KIND = "worker_timeout"
CURRENT_RULE = "losses per hour"


class LoggedFailureDetector(FailureDetector):
    """Failure detector that declares workers lost at the timers at which the log has them lost.

    Args:
        history: records of the run.
    """

    observes = True

    def __init__(self, history: Iterable[Record]) -> None:
        super().__init__()
        self._lost = deque(_lost_at_timers(history))
        self._due: dict[int, str] = {}
        self._change = ""

    def read(self, record: Record) -> None:
        """Process the next record of the log, before the coordinator handles its event."""
        if isinstance(record, TimerRang):
            self._due = self._lost.popleft()
        elif isinstance(record, DecisionMade) and record.kind == KIND:
            self._change = record.reason

    def observe(self, worker: int, round_trip_s: float) -> str:
        """Return the change of the timeout in the log at this arrival."""
        change, self._change = self._change, ""
        return change

    def is_due(self, now: float) -> bool:
        """Return whether the log has workers lost at this timer."""
        return bool(self._due)

    def expired(self, in_flight: Mapping[int, WorkerState], now: float) -> dict[int, str]:
        """Return the workers that the log has lost at this timer, with the reason in the log."""
        return self._due

    def state_dict(self) -> dict[str, Any]:
        """Return no state: a replay reads the log from start to end."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the state."""


def is_needed(history: Iterable[Record]) -> bool:
    """Return whether the run used another rule for timeouts than the current one."""
    for record in history:  # the timeout is recorded at the first round trip
        if isinstance(record, DecisionMade) and record.kind == KIND:
            return CURRENT_RULE not in record.reason
        if isinstance(record, GradientArrived) and record.now_s > record.started_s:
            return False
    return False


def _lost_at_timers(history: Iterable[Record]) -> Iterator[dict[int, str]]:
    """Yield the workers lost at each timer, with the timeout as text."""
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
