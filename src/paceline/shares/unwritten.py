"""Updates and decisions of a balanced run that are not in its log yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from paceline.core.records import DecisionMade, Record
from paceline.recording.timed_updates import TimedUpdate, UpdateRecords


class TimedDecision(NamedTuple):
    """Decision that was made at the end of an update.

    Attributes:
        now_s: end of the update.
        kind: kind of the decision.
        reason: reason in text.
        numbers: a number for each rank.
    """

    now_s: float
    kind: str
    reason: str
    numbers: dict[str, float]


class Unwritten:
    """Updates and decisions in the order in which they come into the log.

    All ranks have the same ones since their number has changed last, as far as they have the sums. So a rank that goes
    on with the log of another one leaves out as many as the log has.

    Args:
        now_s: time at which the first update begins.
    """

    def __init__(self, now_s: float) -> None:
        self._updates: deque[TimedUpdate] = deque()
        self._decisions: deque[TimedDecision] = deque()
        self._left_out = [0, 0]  # updates and decisions
        self._began_s = now_s  # end of the last update that was left out

    def add(self, entry: TimedUpdate | TimedDecision) -> None:
        """Add the next update or decision."""
        entries: deque[TimedUpdate] | deque[TimedDecision]
        entries = self._updates if isinstance(entry, TimedUpdate) else self._decisions
        entries.append(entry)  # type: ignore[arg-type]  # of its own kind

    def forget(self, until_s: float) -> None:
        """Leave out what is older, with which no rank needs to go on any more."""
        while self._updates and self._updates[0].ended_s <= until_s:
            self._leave_out_update()
        while self._decisions and self._decisions[0].now_s <= until_s:
            self._leave_out_decision()

    def leave_out(self, updates: int, decisions: int) -> float:
        """Leave out so many updates and decisions, which another rank has written; return when the last one ended."""
        while self._updates and self._left_out[0] < updates:
            self._leave_out_update()
        while self._decisions and self._left_out[1] < decisions:
            self._leave_out_decision()
        return self._began_s

    def _leave_out_update(self) -> None:
        self._left_out[0] += 1
        self._began_s = self._updates.popleft().ended_s

    def _leave_out_decision(self) -> None:
        self._left_out[1] += 1
        self._decisions.popleft()

    @property
    def updates(self) -> list[TimedUpdate]:
        """Updates that are not written."""
        return list(self._updates)

    def take(self, records: UpdateRecords, zero_s: float, *, is_last: bool = False) -> Iterator[Record]:
        """Yield the records, and have them no more.

        Args:
            records: writer of updates as records.
            zero_s: time at which the run began.
            is_last: whether no update follows; else decisions at the end of the last one wait for the next.
        """
        while self._updates:
            update = self._updates[0]
            yield from self._decided(update.ended_s, zero_s)
            self._leave_out_update()
            yield from records.of(update._replace(began_s=update.began_s - zero_s, ended_s=update.ended_s - zero_s))
        if is_last:
            yield from self._decided(inf, zero_s)

    def _decided(self, before_s: float, zero_s: float) -> Iterator[Record]:
        while self._decisions and self._decisions[0].now_s < before_s:
            now_s, kind, reason, numbers = self._decisions[0]
            self._leave_out_decision()
            yield DecisionMade(now_s=now_s - zero_s, kind=kind, reason=reason, numbers=numbers)
