"""How long a silent worker is waited for before it is declared lost."""

from collections.abc import Mapping
from itertools import takewhile
from math import inf
from typing import Any

from paceline.errors import UsageError
from paceline.roster import Worker

ROUND_TRIPS = 20
LEAST_S = 10.0


class Patience:
    """A timeout on silence, given or derived from observed round trips, and the one alarm that watches it.

    timeout_s = max(20 * longest round trip, 10 s): long enough for a worker that has become 20 times slower
    than the slowest yet seen, and never so short that a pause of the operating system looks like a death.

    Args:
        timeout_s: seconds > 0, or None to derive it.

    Attributes:
        timeout_s: inf while no round trip is known.
        longest_s: of the round trips observed.
        needs_alarm: whether the timeout is known and no alarm is set.

    Example:
        >>> patience = Patience(None)
        >>> patience.observe(3.0)  # the first round trip makes the timeout known
        True
        >>> patience.timeout_s
        60.0
    """

    def __init__(self, timeout_s: float | None) -> None:
        if timeout_s is not None and not 0 < timeout_s < inf:
            raise UsageError(f"worker_timeout_s = {timeout_s!r}, expected seconds > 0")
        self._is_derived = timeout_s is None
        self.timeout_s = inf if timeout_s is None else timeout_s
        self.longest_s = 0.0
        self._set(None)

    def __str__(self) -> str:
        if self._is_derived:
            return f"{self.timeout_s:.3g} s, {ROUND_TRIPS} x the longest round trip or {LEAST_S:g} s"
        return f"worker_timeout_s = {self.timeout_s:g} s"

    def observe(self, round_trip_s: float) -> bool:
        """Take in a round trip; return whether an alarm has to be set now."""
        if self._is_derived and round_trip_s > self.longest_s:
            self.longest_s = round_trip_s
            self.timeout_s = max(ROUND_TRIPS * round_trip_s, LEAST_S)
            self._set(self._alarm_s)
        return self.needs_alarm

    def arm(self, started_s: float) -> float:
        """Set the alarm for work started at this moment and return when it rings."""
        alarm_s = started_s + self.timeout_s
        self._set(alarm_s)
        return alarm_s

    def is_over(self, now: float) -> bool:
        """Return whether the alarm rings at this moment; if so it is off again."""
        if self._alarm_s is None or now < self._alarm_s:
            return False
        self._set(None)
        return True

    def exceeded_by(self, in_flight: Mapping[int, Worker], now: float) -> list[int]:
        """Return the workers, of those at work in the order in which they began, that count as lost by now."""
        silent = takewhile(lambda flight: flight[1].started_s + self.timeout_s <= now, in_flight.items())
        return [worker for worker, _ in silent]

    def state_dict(self) -> dict[str, Any]:
        """Return what was observed, and the alarm."""
        return {"longest_s": self.longest_s, "alarm_s": self._alarm_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state; a timeout that was given stays as it is given now."""
        self.longest_s = state["longest_s"]
        if self._is_derived and self.longest_s:
            self.timeout_s = max(ROUND_TRIPS * self.longest_s, LEAST_S)
        self._set(state["alarm_s"])

    def disarm(self) -> None:
        """Forget the alarm."""
        self._set(None)

    def _set(self, alarm_s: float | None) -> None:
        self._alarm_s = alarm_s
        self.needs_alarm = alarm_s is None and self.timeout_s < inf
