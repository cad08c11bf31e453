"""Straggler detection from the throughput of workers."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from statistics import fmean, pstdev
from typing import Any

from paceline.utils.state_dict import Stateful

Round = dict[int, tuple[int, float]]  # worker -> gradients, busy_s
ROUNDING = 1e-9  # relative; if half of the workers are equally slow, they are at S - sigma exactly
KNOWN = 5  # number of windows before a worker is compared with its own past


class ThroughputStats:
    """Running mean and population standard deviation of a worker's throughput, by Welford's recurrence.

    Example:
        >>> stats = ThroughputStats()
        >>> for throughput in (1.0, 3.0):
        ...     stats.add(throughput)
        >>> stats.mean, stats.deviation
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
        """Add the throughput of a window, in gradients per second."""
        self.count += 1
        before = throughput - self.mean
        self.mean += before / self.count
        self.squares += before * (throughput - self.mean)


class StragglerDetector(Stateful):
    """Straggler detector: finds the workers whose throughput is low for several windows in a row.

    A round is n arrivals, where n is the number of live workers: one update of BSP. A window is a number of rounds.
    Worker k delivers gradients_k in a window and computes for busy_s_k seconds, without waiting for other workers. Its
    throughput is S_k = gradients_k / busy_s_k; all minibatches have one size. S and sigma are the mean and the
    population standard deviation over the workers with an arrival in the window. Worker k is slow in it if

        S_k < S - sigma  and  S_k <= (1 - min_gap) S.

    It is a straggler after `consecutive` slow windows in a row, until a window in which it is not slow. A worker
    without an arrival in a window keeps its status.

    This rule fails if half of the workers are slow, and for two workers. So a worker is also slow if both conditions
    hold with the mean and deviation of its own past: the windows in which it was no straggler, at least 5. If every
    worker is slow in this second sense, the cluster has changed, and none counts as slow by it.

    Args:
        window: length of a window in rounds, >= 1.
        consecutive: number of slow windows in a row that make a straggler (m), >= 1.
        min_gap: smallest relative gap to the mean throughput, in [0, 1).
        sliding: whether a window begins at every round; else it begins where the one before ends.
        own_past: whether a worker is also compared with its own past.

    Source: Li et al. (Sync-Switch) 2021, Sect. IV-B2. Differs: the gap and the comparison with the worker's own past
    are not in the paper. Its detector is ``sliding=True, min_gap=0, own_past=False``.
    """

    _saved = ("_live", "_arrivals", "_rounds", "_slow", "throughput")

    def __init__(
        self,
        window: int = 2,
        consecutive: int = 2,
        min_gap: float = 0.2,
        sliding: bool = False,
        own_past: bool = True,
    ) -> None:
        self._window = window
        self._consecutive = consecutive
        self._min_gap = min_gap
        self._sliding = sliding
        self._own_past = own_past
        self._live = 0
        self._arrivals = 0  # in the open round
        self._rounds: list[Round] = []  # the last one is open
        self._pasts: dict[int, ThroughputStats] = {}
        self._slow: dict[int, int] = {}  # worker -> slow windows in a row
        self.throughput: dict[int, float] = {}  # S_k of the latest window

    @property
    def stragglers(self) -> set[int]:
        """Ids of the current stragglers."""
        return {worker for worker, windows in self._slow.items() if windows >= self._consecutive}

    def observe(self, worker: int, busy_s: float, live: int) -> None:
        """Add the arrival of a gradient.

        Args:
            worker: id of the worker, >= 0.
            busy_s: seconds that the worker spent on it, >= 0.
            live: number of workers that take part (n), >= 1.
        """
        if live != self._live:
            self._live = live
            self._arrivals = 0
            self._rounds = []
        if self._arrivals == 0:
            self._rounds.append({})
        gradients, spent_s = self._rounds[-1].get(worker, (0, 0.0))
        self._rounds[-1][worker] = gradients + 1, spent_s + busy_s
        self._arrivals += 1
        if self._arrivals >= live:
            self._arrivals = 0
            if len(self._rounds) >= self._window:
                self._judge(_throughput(self._rounds))
                self._rounds = self._rounds[1:] if self._sliding else []

    def is_slow_beside(self, throughput: float) -> bool:
        """Return whether a throughput, in gradients per second, is slow compared with the latest window."""
        others = list(self.throughput.values())
        return bool(others) and self._is_below(throughput, fmean(others), pstdev(others))

    @property
    def known(self) -> set[int]:
        """Ids of the workers with an arrival in any window."""
        return {*self._pasts, *self._slow}

    def remove(self, worker: int) -> None:
        """Remove all data of a worker that has left or was replaced."""
        self._pasts.pop(worker, None)
        self.clear(worker)

    def clear(self, worker: int) -> None:
        """Remove a worker from the stragglers and from the latest window, until the next one."""
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
            if worker not in self.stragglers:  # an occasional slow window is normal
                self._pasts.setdefault(worker, ThroughputStats()).add(each)

    def _is_below(self, throughput: float, mean: float, deviation: float) -> bool:
        return throughput < mean - deviation - ROUNDING * mean and throughput <= (1 - self._min_gap) * mean

    def _is_below_past(self, worker: int, throughput: float) -> bool:
        past = self._pasts.get(worker) if self._own_past else None
        return past is not None and past.count >= KNOWN and self._is_below(throughput, past.mean, past.deviation)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        pasts = {worker: (past.count, past.mean, past.squares) for worker, past in self._pasts.items()}
        return {"pasts": pasts, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        self._pasts = {worker: ThroughputStats(*past) for worker, past in state["pasts"].items()}
        super().load_state_dict(state)


def _throughput(rounds: list[Round]) -> dict[int, float]:
    """Return the throughput of every worker with a measured time, in gradients per second."""
    totals: Round = {}
    for each in rounds:
        for worker, (delivered, spent_s) in each.items():
            gradients, busy_s = totals.get(worker, (0, 0.0))
            totals[worker] = gradients + delivered, busy_s + spent_s
    return {worker: gradients / busy_s for worker, (gradients, busy_s) in totals.items() if busy_s > 0}
