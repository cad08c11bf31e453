"""Durations of the parts of a DDP step of one rank, from the times of its marks."""

from __future__ import annotations

from collections.abc import Callable

Row = tuple[int, int, int, int, int, int, int]  # as layout.STEP_COLUMNS


class StepTimer:
    """Stopwatch of one rank: each mark ends a part of the step, and the end of the sums ends the step.

    The time of other collectives is taken off the part in which they ran. Times are nanoseconds of any monotonic clock.

    Args:
        emit: function that takes the row of each finished step.

    Attributes:
        step: number of steps finished so far.

    >>> rows = []
    >>> timer = StepTimer(rows.append)
    >>> timer.forward_began(100)
    >>> timer.backward_began(130)
    >>> timer.graph_done(180)
    >>> timer.backward_ended(200, is_synced=True)
    >>> rows
    [(0, 100, 0, 30, 50, 0, 20)]
    """

    def __init__(self, emit: Callable[[Row], object]) -> None:
        self.step = 0
        self._emit = emit
        self._begin_ns: int | None = None
        self._last_ns = 0
        self._is_forward = False
        self._is_done = False
        self._clear()

    def _clear(self) -> None:
        self._data_ns = self._forward_ns = self._backward_ns = self._collectives_ns = self._sync_ns = 0

    def forward_began(self, now_ns: int) -> None:
        """Mark a call of the model with gradients; only the first one before a backward pass ends the data part."""
        if self._begin_ns is None:
            self._begin_ns = self._last_ns = now_ns
        if not self._is_forward:
            self._data_ns += now_ns - self._last_ns
            self._last_ns = now_ns
            self._is_forward = True

    def backward_began(self, now_ns: int) -> None:
        """Mark the call of a backward pass; without a known forward pass the time before it is data."""
        if self._begin_ns is None:
            self._begin_ns = self._last_ns = now_ns
        if self._is_forward:
            self._forward_ns += now_ns - self._last_ns
        else:
            self._data_ns += now_ns - self._last_ns
        self._last_ns = now_ns
        self._is_forward = self._is_done = False

    def graph_done(self, now_ns: int) -> None:
        """Mark the end of the rank's own graph, before the wait for the sums."""
        self._backward_ns += now_ns - self._last_ns
        self._last_ns = now_ns
        self._is_done = True

    def backward_ended(self, now_ns: int, *, is_synced: bool) -> None:
        """Mark the return of the backward pass; one with sums ends the step."""
        if not is_synced or not self._is_done:
            self._backward_ns += now_ns - self._last_ns
            self._last_ns = now_ns
        if not is_synced:
            return
        if self._begin_ns is not None and self._is_done:
            parts_ns = (self._data_ns, self._forward_ns, self._backward_ns, self._collectives_ns)
            self._emit((self.step, self._begin_ns, *parts_ns, self._sync_ns + now_ns - self._last_ns))
        self._begin_ns = self._last_ns = now_ns
        self._clear()
        self.step += 1

    def collective_took(self, taken_ns: int) -> None:
        """Move the time of a collective that has just ended from the current part to the collectives."""
        self._collectives_ns += taken_ns
        self._last_ns += taken_ns

    def sums_took(self, taken_ns: int) -> None:
        """Move the time of sums that ended inside of the graph to the wait for the sums."""
        self._sync_ns += taken_ns
        self._last_ns += taken_ns

    def skip(self, taken_ns: int) -> None:
        """Leave out time that the probe itself has just used."""
        self._last_ns += taken_ns
        if self._begin_ns is not None:
            self._begin_ns += taken_ns
