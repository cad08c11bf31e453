"""Median of the latest values that begins anew when the values have jumped."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from paceline.utils.state_dict import Stateful
from paceline.utils.validation import check_range

JUMP = 2.0  # beyond which factor a value is far from the median
JUMPS = 2  # far values in a row, on the same side, after which the older ones do not count


class RestartingMedian(Stateful):
    """Median of the latest values, which forgets the older ones when two in a row lie far on one side.

    A long window is steady under noise, and late after a jump; a short one is the opposite. Two values in a row beyond
    twice the median, or below half of it, are a jump: the window begins anew with them.

    Args:
        window: largest number of values, >= 1.

    Attributes:
        values: values in the window, in order of time.

    Example:
        >>> seconds = RestartingMedian(15)
        >>> for value in (1.0, 1.1, 0.9, 1.0, 3.0):
        ...     seconds.add(value)
        >>> seconds.median
        1.0
        >>> seconds.add(3.2)
        >>> seconds.median
        3.1

    Source: none; the two windows in one were found with a model of stragglers that move and of jitter.
    """

    __slots__ = ("_window", "values")

    def __init__(self, window: int) -> None:
        check_range("[1, inf)", window=window)
        self._window = window
        self.values: deque[float] = deque(maxlen=window)

    def state_dict(self) -> dict[str, Any]:
        """Return the values."""
        return {"values": list(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such values."""
        self.values = deque(state["values"], maxlen=self._window)

    @property
    def median(self) -> float:
        """Median of the window; nan without values."""
        return median(self.values) if self.values else float("nan")

    def add(self, value: float) -> None:
        """Add a value, > 0."""
        self.values.append(value)
        latest = list(self.values)[-JUMPS:]
        before = list(self.values)[:-JUMPS]
        if before:
            middle = median(before)
            if min(latest) > JUMP * middle or max(latest) < middle / JUMP:
                self.values = deque(latest, maxlen=self._window)
