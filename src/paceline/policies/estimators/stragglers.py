"""Which workers are stragglers, from how long their gradients take."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from statistics import fmean, pstdev
from typing import Any

from paceline.utils.state_dict import restore, snapshot

Round = dict[int, tuple[int, float]]  # worker -> gradients, busy_s
ROUNDING = 1e-9  # where half of the workers are equally slow, they are at S - sigma exactly
KNOWN = 5  # windows after which a worker's own past tells what is normal for it


class Past:
    """Mean and population standard deviation of a worker's throughput so far, by Welford's recurrence.

    Example:
        >>> past = Past()
        >>> for throughput in (1.0, 3.0):
        ...     past.add(throughput)
        >>> past.mean, past.deviation
        (2.0, 1.0)
    """

    def __init__(self, count: int = 0, mean: float = 0.0, squares: float = 0.0) -> None:
        self.count = count
        self.mean = mean
        self.squares = squares

    @property
    def deviation(self) -> float:
        """Population standard deviation."""
        return sqrt(self.squares / self.count)

    def add(self, throughput: float) -> None:
        """Take in one more window."""
        self.count += 1
        before = throughput - self.mean
        self.mean += before / self.count
        self.squares += before * (throughput - self.mean)


class StragglerDetector:
    """Finds the workers whose throughput has fallen behind for several windows in a row.

    A round is n arrivals, n being the live workers: an update of BSP. A window is so many rounds. In it, worker k has
    delivered gradients_k and worked busy_s_k seconds on them, waiting for others not counted: its throughput is
    S_k = gradients_k / busy_s_k, every minibatch being of one size. With mean S and population standard deviation sigma
    over the workers heard of in the window, worker k is slow in it if

        S_k < S - sigma  and  S_k <= (1 - min_gap) S,

    and a straggler after `consecutive` slow windows in a row, until a window in which it is not slow. A worker that is
    not heard of in a window stays what it is.

    The rule is blind where half of the workers are slow, and for two workers. So a worker is slow, too, if both hold
    with the mean and deviation of its own past, the windows in which it was no straggler, once there are 5 of them. If
    every worker is slow in that sense, it is not the workers that have changed, and none is.

    Args:
        window: rounds, >= 1.
        consecutive: slow windows in a row (m), >= 1.
        min_gap: smallest relative gap, in [0, 1).
        sliding: whether a window begins with every round, rather than where the one before has ended.

    Source: Li et al. (Sync-Switch) 2021, Sect. IV-B2; gap and own past are ours.
    """

    def __init__(self, window: int = 2, consecutive: int = 2, min_gap: float = 0.2, sliding: bool = False) -> None:
        self._window = window
        self._consecutive = consecutive
        self._min_gap = min_gap
        self._sliding = sliding
        self._live = 0
        self._heard = 0  # arrivals of the open round
        self._rounds: list[Round] = []  # the last one is open
        self._pasts: dict[int, Past] = {}
        self._slow: dict[int, int] = {}  # windows in a row
        self.throughput: dict[int, float] = {}  # S_k of the latest window

    @property
    def stragglers(self) -> set[int]:
        """Who is one now."""
        return {worker for worker, windows in self._slow.items() if windows >= self._consecutive}

    def hear(self, worker: int, busy_s: float, live: int) -> None:
        """Take in an arrival.

        Args:
            worker: whose.
            busy_s: seconds that the worker has spent on it, >= 0.
            live: workers that take part (n), >= 1.
        """
        if live != self._live:
            self._live, self._heard, self._rounds = live, 0, []
        if self._heard == 0:
            self._rounds.append({})
        gradients, spent_s = self._rounds[-1].get(worker, (0, 0.0))
        self._rounds[-1][worker] = gradients + 1, spent_s + busy_s
        self._heard += 1
        if self._heard >= live:
            self._heard = 0
            if len(self._rounds) >= self._window:
                self._judge(_throughput(self._rounds))
                self._rounds = self._rounds[1:] if self._sliding else []

    def is_slow_beside(self, throughput: float) -> bool:
        """Return whether this would be slow beside the latest window of the others."""
        others = list(self.throughput.values())
        return bool(others) and self._is_below(throughput, fmean(others), pstdev(others))

    @property
    def known(self) -> set[int]:
        """Who was heard of in some window."""
        return {*self._pasts, *self._slow}

    def forget(self, worker: int) -> None:
        """Know nothing of a worker: it is gone, or another one has come in its place."""
        self._pasts.pop(worker, None)
        self.excuse(worker)

    def excuse(self, worker: int) -> None:
        """Let a worker be no straggler, and not be among those that others are compared with, until the next window."""
        self._slow.pop(worker, None)
        self.throughput.pop(worker, None)

    def _judge(self, throughput: dict[int, float]) -> None:
        self.throughput = throughput
        if not throughput:
            return
        mean, deviation = fmean(throughput.values()), pstdev(throughput.values())
        behind = {worker for worker, each in throughput.items() if self._is_below(each, mean, deviation)}
        changed = {worker for worker, each in throughput.items() if self._is_below_past(worker, each)}
        if len(changed) < len(throughput):
            behind |= changed
        for worker, each in throughput.items():
            if worker in behind:
                self._slow[worker] = self._slow.get(worker, 0) + 1
            else:
                self._slow.pop(worker, None)
            if worker not in self.stragglers:  # a slow window now and then is part of what is normal
                self._pasts.setdefault(worker, Past()).add(each)

    def _is_below(self, throughput: float, mean: float, deviation: float) -> bool:
        return throughput < mean - deviation - ROUNDING * mean and throughput <= (1 - self._min_gap) * mean

    def _is_below_past(self, worker: int, throughput: float) -> bool:
        past = self._pasts.get(worker)
        return past is not None and past.count >= KNOWN and self._is_below(throughput, past.mean, past.deviation)

    def state_dict(self) -> dict[str, Any]:
        """Return what was heard."""
        pasts = {worker: (past.count, past.mean, past.squares) for worker, past in self._pasts.items()}
        return {"pasts": pasts, **snapshot(self, _SAVED)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self._pasts = {worker: Past(*past) for worker, past in state["pasts"].items()}
        restore(self, _SAVED, state)


_SAVED = ("_live", "_heard", "_rounds", "_slow", "throughput")


def _throughput(rounds: list[Round]) -> dict[int, float]:
    """Return that of every worker whose time was measured."""
    totals: Round = {}
    for each in rounds:
        for worker, (delivered, spent_s) in each.items():
            gradients, busy_s = totals.get(worker, (0, 0.0))
            totals[worker] = gradients + delivered, busy_s + spent_s
    return {worker: gradients / busy_s for worker, (gradients, busy_s) in totals.items() if busy_s > 0}
