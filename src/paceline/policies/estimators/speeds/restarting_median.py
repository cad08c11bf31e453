"""Median of the latest values that begins anew when the values have jumped."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from paceline.utils.state_dict import Stateful
from paceline.utils.validation import check_range

JUMP = 2.0  # beyond which factor a value is far from the median
SINGLE_AT_FIRST = 2  # far values alone, before any were seen


class JumpCounts(Stateful):
    """Counts of far values that were followed by another one, and of those that were not.

    Attributes:
        lasting: number of far values with another one behind them, on the same side.
        single: number of the others.
    """

    _saved = ("lasting", "single")

    def __init__(self) -> None:
        self.lasting = 0
        self.single = SINGLE_AT_FIRST

    @property
    def last_mostly(self) -> bool:
        """Whether most far values were the first of several."""
        return self.lasting > self.single


class RestartingMedian(Stateful):
    """Median of the latest values, without those before a jump.

    A long window is steady under noise, and late after a jump; a short one is the opposite. A value beyond twice the
    median, or below half of it, is far. Two far values in a row, on the same side, are a jump: the window begins anew
    with them. Where most far values were followed by another one, it begins anew with the first one; if that one stays
    alone, the values before it count again.

    Args:
        window: largest number of values, >= 1.
        jumps: counts of far values, which several medians may share; None for counts of its own.

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

    Source: none; the rule was found with a model of stragglers that move and of jitter.
    """

    __slots__ = ("_before", "_jumps", "_window", "values")

    def __init__(self, window: int, jumps: JumpCounts | None = None) -> None:
        check_range("[1, inf)", window=window)
        self._window = window
        self._jumps = jumps or JumpCounts()
        self._before: list[float] = []  # window before the latest value, if that was far
        self.values: deque[float] = deque(maxlen=window)

    @property
    def median(self) -> float:
        """Median of the window; nan without values."""
        return median(self.values) if self.values else float("nan")

    def add(self, value: float) -> None:
        """Add a value, > 0."""
        if self._before:
            before, first = self._before, self.values[-1]
            self._before = []
            lasts = _side(first, before) == _side(value, before)
            self._jumps.lasting += lasts
            self._jumps.single += not lasts
            self.values = deque([first] if lasts else [*before, first], self._window)
            if lasts:
                self.values.append(value)
                return
        if self.values and _side(value, self.values):
            self._before = list(self.values)
            if self._jumps.last_mostly:
                self.values.clear()
        self.values.append(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the values, and those before a far one."""
        return {"values": list(self.values), "before": list(self._before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such values."""
        self.values = deque(state["values"], self._window)
        self._before = list(state["before"])


def _side(value: float, of: deque[float] | list[float]) -> int:
    """Return 1 or -1 for a value far above or below the median of others, else 0."""
    middle = median(of)
    if value > JUMP * middle:
        return 1
    return -1 if value < middle / JUMP else 0
