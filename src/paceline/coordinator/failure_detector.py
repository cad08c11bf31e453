"""Timeout-based failure detector."""

from collections.abc import Mapping
from itertools import takewhile
from math import inf
from typing import Any

from paceline.coordinator.worker_table import WorkerState
from paceline.errors import UsageError
from paceline.policies.estimators.timeouts.round_trip_timeout import RoundTripTimeout

NOTICEABLE = 2.0  # a change of the timeout by this factor is logged


class FailureDetector:
    """Fixed timeout on silent workers, with one timer for all workers.

    Args:
        timeout_s: silence after which a worker is declared lost, in seconds, > 0; None for no timeout.

    Attributes:
        timeout_s: timeout in seconds; inf for no timeout.
        observes: whether round trips change the timeout.
        needs_timer: whether there is a timeout and no timer is set.

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
        """Adapt the timeout to a round trip; return a description if it has changed noticeably, else an empty string.

        Args:
            worker: number of the worker.
            round_trip_s: time from assigned work to its gradient, in seconds.
        """
        return ""

    def add_loss(self, worker: int) -> None:
        """Adapt the timeout to the loss of a worker, other than that by its timeout; a fixed one does not change."""

    def timeout_of(self, worker: int) -> float:
        """Return the timeout of this worker, in seconds, at least `timeout_s`."""
        return self.timeout_s

    def describe(self, worker: int) -> str:
        """Return a description of the timeout of this worker."""
        return f"worker_timeout_s = {self.timeout_s:g} s"

    def arm(self, in_flight: Mapping[int, WorkerState], now: float) -> float:
        """Set the timer to the first time at which a timeout can expire, and return that time in seconds.

        Args:
            in_flight: busy workers, in the order in which their work was assigned; at least one.
            now: current time, in seconds.
        """
        timer_s = now + self.timeout_s  # not later, so that it covers work assigned from now on
        for worker, state in in_flight.items():
            next_s = state.started_s + self.timeout_s
            if next_s > now:
                timer_s = min(timer_s, next_s)
                break
            timer_s = min(timer_s, state.started_s + self.timeout_of(worker))
        self._set(timer_s)
        return timer_s

    def is_due(self, now: float) -> bool:
        """Return whether the timer is due; if so, it is unset."""
        if self._timer_s is None or now < self._timer_s:
            return False
        self._set(None)
        return True

    def expired(self, in_flight: Mapping[int, WorkerState], now: float) -> dict[int, str]:
        """Return the busy workers whose timeout has expired, each with a description of the timeout."""
        silent = takewhile(lambda flight: flight[1].started_s + self.timeout_s <= now, in_flight.items())
        return {
            worker: self.describe(worker)
            for worker, state in silent
            if state.started_s + self.timeout_of(worker) <= now
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the timer and what was observed."""
        return {"timer_s": self._timer_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load such a state; a fixed timeout keeps its current value."""
        self._set(state["timer_s"] if self.timeout_s < inf else None)

    def disarm(self) -> None:
        """Unset the timer."""
        self._set(None)

    def _set(self, timer_s: float | None) -> None:
        self._timer_s = timer_s
        self.needs_timer = timer_s is None and self.timeout_s < inf


class RoundTripFailureDetector(FailureDetector):
    """Timeout on silent workers that follows observed round trips and losses; see `RoundTripTimeout`.

    Example:
        >>> detector = RoundTripFailureDetector()
        >>> detector.observe(0, 3.0)  # the first round trip makes the timeout known
        '7.66e+03 s, at a median round trip of 3 s and 0.1 losses per hour'
    """

    observes = True

    def __init__(self) -> None:
        super().__init__()
        self._timeout = RoundTripTimeout()
        self._logged_s = inf

    def observe(self, worker: int, round_trip_s: float) -> str:
        """Adapt the timeout to a round trip; return a description if it has changed noticeably, else an empty string.

        Args:
            worker: number of the worker.
            round_trip_s: time from assigned work to its gradient, in seconds.
        """
        if not self._timeout.observe(worker, round_trip_s):
            return ""
        shrinks = self._timeout.timeout_s < self.timeout_s
        self.timeout_s = self._timeout.timeout_s
        self._set(None if shrinks else self._timer_s)  # a timer for the longer timeout would be late
        if self._logged_s / NOTICEABLE < self.timeout_s < self._logged_s * NOTICEABLE:
            return ""
        self._logged_s = self.timeout_s
        return _describe(self.timeout_s, self._timeout.median_of_all_s, self._timeout.hazards.largest)

    def add_loss(self, worker: int) -> None:
        """Adapt the timeout to the loss of a worker, other than that by its timeout; it changes at the next arrival."""
        self._timeout.hazards.add_loss(worker)

    def timeout_of(self, worker: int) -> float:
        """Return the timeout of this worker, in seconds, at least `timeout_s`."""
        return self._timeout.of(worker)

    def describe(self, worker: int) -> str:
        """Return a description of the timeout of this worker."""
        timeout = self._timeout
        return _describe(timeout.of(worker), timeout.median_s(worker), timeout.hazards.of(worker))

    def state_dict(self) -> dict[str, Any]:
        """Return the timer and what was observed."""
        return {**super().state_dict(), "round_trips": self._timeout.state_dict(), "logged_s": self._logged_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load such a state, or that of a fixed timeout, after which the round trips are observed anew."""
        if "round_trips" in state:
            self._timeout.load_state_dict(state["round_trips"])
            self.timeout_s = self._timeout.timeout_s
            self._logged_s = state["logged_s"]
        super().load_state_dict(state)


def _describe(timeout_s: float, median_s: float, hazard: float) -> str:
    return f"{timeout_s:.3g} s, at a median round trip of {median_s:.3g} s and {3600 * hazard:.2g} losses per hour"
