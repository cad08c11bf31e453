"""How long a silent worker is waited for before it is declared lost."""

from collections.abc import Mapping
from math import inf
from typing import Any

from paceline.errors import UsageError

ROUND_TRIPS = 20
LEAST_S = 10.0


class Patience:
    """A timeout on silence, given or derived from observed round trips, and the one alarm that watches it.

    timeout_s = max(20 * longest round trip, 10 s): long enough for a worker that has become 20 times slower
    than the slowest yet seen, and never so short that a pause of the operating system looks like a death.

    Args:
        timeout_s: seconds > 0, or None to derive it.

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
        self.longest_s = 0.0
        self._alarm_s: float | None = None
        self.timeout_s = inf if timeout_s is None else timeout_s

    def __str__(self) -> str:
        if self._is_derived:
            return f"{self.timeout_s:.3g} s, {ROUND_TRIPS} x the longest round trip or {LEAST_S:g} s"
        return f"worker_timeout_s = {self.timeout_s:g} s"

    @property
    def is_due_to_arm(self) -> bool:
        """Whether the timeout is known and no alarm is set."""
        return self._alarm_s is None and self.timeout_s < inf

    def observe(self, round_trip_s: float) -> bool:
        """Take in a round trip; return whether an alarm has to be set now."""
        if self._is_derived and round_trip_s > self.longest_s:
            self.longest_s = round_trip_s
            self.timeout_s = max(ROUND_TRIPS * round_trip_s, LEAST_S)
        return self.is_due_to_arm

    def arm(self, started_s: float) -> float:
        """Set the alarm for work started at this moment and return when it rings."""
        self._alarm_s = started_s + self.timeout_s
        return self._alarm_s

    def is_over(self, now: float) -> bool:
        """Return whether the alarm rings at this moment; if so it is off again."""
        if self._alarm_s is None or now < self._alarm_s:
            return False
        self._alarm_s = None
        return True

    def is_exceeded(self, started_s: float, now: float) -> bool:
        """Return whether a worker that began then counts as lost by now."""
        return started_s + self.timeout_s <= now

    def state_dict(self) -> dict[str, Any]:
        """Return what was observed, and the alarm."""
        return {"longest_s": self.longest_s, "alarm_s": self._alarm_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state; a timeout that was given stays as it is given now."""
        self.longest_s = state["longest_s"]
        self._alarm_s = state["alarm_s"]
        if self._is_derived and self.longest_s:
            self.timeout_s = max(ROUND_TRIPS * self.longest_s, LEAST_S)

    def disarm(self) -> None:
        """Forget the alarm."""
        self._alarm_s = None
