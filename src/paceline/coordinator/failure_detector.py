"""How long a silent worker is waited for before it is declared lost."""

from collections.abc import Mapping
from itertools import takewhile
from math import inf
from typing import Any

from paceline.coordinator.worker_table import WorkerState
from paceline.errors import UsageError
from paceline.policies.estimators.round_trip_timeout import LEAST_S, RoundTripTimeout

NOTICEABLE = 2.0  # a timeout that has changed by this factor is logged again


class FailureDetector:
    """A timeout on silence, given by the user, and the one alarm that watches it.

    Args:
        timeout_s: seconds > 0, or None: then no worker is ever lost by its silence, as in a simulation.

    Attributes:
        timeout_s: inf for none.
        observes: whether round trips change the timeout.
        needs_alarm: whether there is a timeout and no alarm is set.

    Example:
        >>> FailureDetector(None).timeout_s, FailureDetector(5.0).timeout_s
        (inf, 5.0)
    """

    observes = False

    def __init__(self, timeout_s: float | None = None) -> None:
        if timeout_s is not None and not 0 < timeout_s < inf:
            raise UsageError(f"worker_timeout_s={timeout_s!r}, expected seconds > 0")
        self.timeout_s = inf if timeout_s is None else timeout_s
        self._set(None)

    def observe(self, worker: int, round_trip_s: float) -> str:
        """Take in a round trip; return the timeout in words if it has changed noticeably, else nothing."""
        return ""

    def of(self, worker: int) -> float:
        """Return the seconds that this worker may be silent, at least `timeout_s`."""
        return self.timeout_s

    def words(self, worker: int) -> str:
        """Return the timeout of this worker in words."""
        return f"worker_timeout_s = {self.timeout_s:g} s"

    def arm(self, in_flight: Mapping[int, WorkerState], now: float) -> float:
        """Set the alarm for the first moment at which a worker may become lost, and return it.

        Args:
            in_flight: workers at work, in the order in which they began; at least one.
            now: seconds.
        """
        alarm_s = now + self.timeout_s  # no later, so that it is in time for work that is given from now on
        for worker, state in in_flight.items():
            next_s = state.started_s + self.timeout_s
            if next_s > now:
                alarm_s = min(alarm_s, next_s)
                break
            alarm_s = min(alarm_s, state.started_s + self.of(worker))
        self._set(alarm_s)
        return alarm_s

    def is_over(self, now: float) -> bool:
        """Return whether the alarm rings at this moment; if so it is off again."""
        if self._alarm_s is None or now < self._alarm_s:
            return False
        self._set(None)
        return True

    def exceeded_by(self, in_flight: Mapping[int, WorkerState], now: float) -> dict[int, str]:
        """Return the workers, of those at work in the order in which they began, that count as lost by now, and why."""
        silent = takewhile(lambda flight: flight[1].started_s + self.timeout_s <= now, in_flight.items())
        return {worker: self.words(worker) for worker, state in silent if state.started_s + self.of(worker) <= now}

    def state_dict(self) -> dict[str, Any]:
        """Return what was observed, and the alarm."""
        return {"alarm_s": self._alarm_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state; a timeout that was given stays as it is given now."""
        self._set(state["alarm_s"] if self.timeout_s < inf else None)

    def disarm(self) -> None:
        """Forget the alarm."""
        self._set(None)

    def _set(self, alarm_s: float | None) -> None:
        self._alarm_s = alarm_s
        self.needs_alarm = alarm_s is None and self.timeout_s < inf


class RoundTripFailureDetector(FailureDetector):
    """A timeout on silence that follows observed round trips; see `RoundTripTimeout`.

    Example:
        >>> patience = RoundTripFailureDetector()
        >>> patience.observe(0, 3.0)  # the first round trip makes the timeout known
        '7.77e+03 s, as the median round trip is 3 s'
    """

    observes = True

    def __init__(self) -> None:
        super().__init__()
        self._silence = RoundTripTimeout()
        self._told_s = inf

    def observe(self, worker: int, round_trip_s: float) -> str:
        """Take in a round trip; return the timeout in words if it has changed noticeably, else nothing."""
        if not self._silence.observe(worker, round_trip_s):
            return ""
        shrinks = self._silence.timeout_s < self.timeout_s
        self.timeout_s = self._silence.timeout_s
        self._set(None if shrinks else self._alarm_s)
        if self._told_s / NOTICEABLE < self.timeout_s < self._told_s * NOTICEABLE:
            return ""
        self._told_s = self.timeout_s
        return f"{self.timeout_s:.3g} s, as the median round trip is {self._silence.median_s:.3g} s"

    def of(self, worker: int) -> float:
        """Return the seconds that this worker may be silent, at least `timeout_s`."""
        return self._silence.of(worker)

    def words(self, worker: int) -> str:
        """Return the timeout of this worker in words."""
        return f"{self.of(worker):.3g} s, {self._silence.multiple:.0f} x the median round trip or {LEAST_S:g} s"

    def state_dict(self) -> dict[str, Any]:
        """Return what was observed, and the alarm."""
        return {**super().state_dict(), "silence": self._silence.state_dict(), "told_s": self._told_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state; a run that was saved under another rule observes anew."""
        if "silence" in state:
            self._silence.load_state_dict(state["silence"])
            self.timeout_s, self._told_s = self._silence.timeout_s, state["told_s"]
        super().load_state_dict(state)
