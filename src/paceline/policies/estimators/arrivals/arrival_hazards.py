"""Hazard of the arrival of each worker's work, learnt from round trips of which some were cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from paceline.utils.state_dict import Stateful

Floats = NDArray[np.float64]

EDGES: Floats = np.concatenate([[0.0], np.geomspace(1e-3, 1e5, 241)])  # of the bins, in seconds; each 8 % wider
WIDTHS: Floats = np.diff(EDGES)
LONGEST_S = 0.999 * float(EDGES[-1])
ARRIVALS = 64  # latest arrivals of a worker that count, by exponential weights
MOST_EXPECTED = 16.0  # arrivals that one trip counts for in that
LARGEST_SUM = 12.0  # log likelihood ratio at which the hazards have changed
LARGEST_SURPRISE = 4.0  # expected arrivals of one trip in that ratio
KEPT = 0.1  # weight of earlier trips after a change
OWN_TRIPS = 16.0  # trips at risk for which a worker's own hazard counts as much as that of all workers
LEAST_VARIANCE = 1e-3
ITERATIONS = 3


class ArrivalHazards(Stateful):
    """Hazards of arrivals by worker: arrivals per second at each age of the work.

    Work of age a arrives within h more seconds with probability

        1 - exp(H(a) - H(a + h)),    H(a) = integral of the hazard from 0 to a.

    The hazard is constant within each of 241 bins of the age: arrivals in the bin over the seconds that work spent in
    it. A cancelled trip counts with its seconds only; this is the estimate for censored data. Earlier trips of a worker
    lose weight with each arrival of it, and with each arrival that was expected. It is combined in two steps, because a
    worker has few trips of its own:

        worker, expected:  z_w r,          r the hazard of all workers, z_w the speed of the worker
        worker:            the same, with its own arrivals at each age, where it has trips.

    z_w is the ratio of the arrivals of the worker to those that r predicts, shrunk to 1 by the variance between
    workers (gamma frailty). An age that no work has reached has the mean hazard of all ages.

    Two sums of log likelihood ratios detect that arrivals have become twice as likely, or half as likely. Then all
    earlier trips keep a tenth of their weight.

    Sources: Friedman, "Piecewise exponential models for survival data with covariates", 1982; Hougaard, "Analysis of
    multivariate survival data", 2000, Ch. 7 (gamma frailty); Hjort, "Nonparametric Bayes estimators based on beta
    processes", 1990 (own and prior hazard); Page, "Continuous inspection schemes", 1954 (detector).

    Attributes:
        mean_trip_s: mean seconds of a trip, as if all were exponential; 0 before the first `fit`.

    Example:
        >>> hazards = ArrivalHazards()
        >>> for i in range(40):
        ...     hazards.add(0, 1.0 + i % 10 / 10, arrived=True)
        >>> hazards.fit([0])
        >>> [round(float(p), 2) for p in hazards.arrivals([0], [0.5], [0.4, 1.0, 3.0])]
        [0.0, 0.51, 0.99]
    """

    _saved = ("mean_trip_s", "_rows", "_arrived", "_exposed_s", "_speeds", "_hazard", "_cumulative", "_sums")

    def __init__(self) -> None:
        self.mean_trip_s = 0.0
        self._rows: dict[int, int] = {}  # worker -> row
        self._arrived: Floats = np.zeros((0, len(WIDTHS)))
        self._exposed_s: Floats = np.zeros((0, len(WIDTHS)))
        self._speeds: Floats = np.zeros(0)
        self._hazard: Floats = np.zeros((0, len(WIDTHS)))
        self._cumulative: Floats = np.zeros((0, len(EDGES)))
        self._sums = (0.0, 0.0)  # of the detector of changes

    def add(self, worker: int, seconds: float, arrived: bool) -> None:
        """Add a trip of a worker: its seconds, >= 0, and whether it arrived or was cancelled."""
        row = self._row(worker)
        seconds = min(max(seconds, 0.0), LONGEST_S)
        at = max(int(np.searchsorted(EDGES, seconds)) - 1, 0)
        arrivals, exposed_s = self._arrived[row], self._exposed_s[row]
        expected = self._expected(row, at, seconds)
        weight = 1.0 - max(float(arrived), min(expected, MOST_EXPECTED)) / ARRIVALS
        self._detect(arrived, min(expected, LARGEST_SURPRISE))
        arrivals *= weight
        exposed_s *= weight
        arrivals[at] += arrived
        exposed_s[:at] += WIDTHS[:at]
        exposed_s[at] += seconds - EDGES[at]

    def _expected(self, row: int, at: int, seconds: float) -> float:
        """Return the arrivals that the latest fit expects of a trip that ends in this bin; 0 before the first fit."""
        if row >= len(self._cumulative):
            return 0.0
        return float(self._cumulative[row, at] + self._hazard[row, at] * (seconds - EDGES[at]))

    def _detect(self, arrived: bool, expected: float) -> None:
        """Add a trip to the detector of changes; after a change earlier trips count little."""
        if not expected:
            return
        up, down = self._sums
        up = max(0.0, up + arrived * log(2) - expected)
        down = max(0.0, down - arrived * log(2) + expected / 2)
        self._sums = (up, down)
        if max(up, down) > LARGEST_SUM:
            self._sums = (0.0, 0.0)
            self._arrived *= KEPT
            self._exposed_s *= KEPT

    def _row(self, worker: int) -> int:
        if worker not in self._rows:
            self._rows[worker] = len(self._rows)
            self._arrived, self._exposed_s = (
                np.concatenate([old, np.zeros((1, len(WIDTHS)))]) for old in (self._arrived, self._exposed_s)
            )
            self._speeds = np.append(self._speeds, 1.0)
        return self._rows[worker]

    def fit(self, workers: Sequence[int]) -> None:
        """Compute the hazards from the trips so far, if one has arrived; `arrivals` uses these until the next fit.

        Args:
            workers: numbers of the workers that may be given to `arrivals`.
        """
        for worker in workers:
            self._row(worker)
        arrived, exposed_s = self._arrived, self._exposed_s
        arrivals, seconds = float(arrived.sum()), float(exposed_s.sum())
        if not (arrivals > 0 and seconds > 0):
            return
        self.mean_trip_s = seconds / arrivals
        own, at_age = arrived.sum(axis=1), arrived.sum(axis=0)
        speeds = self._speeds
        for _ in range(ITERATIONS):
            # One more trip at the mean hazard gives ages that no work has reached that hazard.
            hazard = (at_age + WIDTHS / self.mean_trip_s) / ((speeds[:, None] * exposed_s).sum(axis=0) + WIDTHS)
            expected = (exposed_s * hazard).sum(axis=1)
            weight = 1.0 / _variance_of_speeds(own, expected)
            speeds = (own + weight) / (expected + weight)
        self._speeds = speeds
        prior = speeds[:, None] * hazard
        self._hazard = (OWN_TRIPS * WIDTHS * prior + arrived) / (OWN_TRIPS * WIDTHS + exposed_s)
        self._cumulative = np.zeros((len(speeds), len(EDGES)))
        np.cumsum(self._hazard * WIDTHS, axis=1, out=self._cumulative[:, 1:])

    def knows(self, worker: int) -> bool:
        """Return whether the latest fit included this worker."""
        return self._rows.get(worker, len(self._cumulative)) < len(self._cumulative)

    def arrivals(self, workers: Sequence[int], elapsed_s: Sequence[float], horizons_s: Sequence[float]) -> Floats:
        """Return the expected number of arrivals within each horizon, after a fit that included these workers.

        Args:
            workers: workers whose work is in flight.
            elapsed_s: seconds since this work was assigned, >= 0, in the same order.
            horizons_s: seconds from now, >= 0.
        """
        rows = np.array([self._rows[worker] for worker in workers], dtype=np.intp)[:, None]
        ages = np.asarray(elapsed_s, dtype=float)[:, None] + np.concatenate([[0.0], horizons_s])
        ages = np.minimum(ages, LONGEST_S)
        bins = np.searchsorted(EDGES, ages, side="right") - 1
        cumulative = self._cumulative[rows, bins] + self._hazard[rows, bins] * (ages - EDGES[bins])
        found: Floats = -np.expm1(cumulative[:, :1] - cumulative[:, 1:]).sum(axis=0)
        return found


def _variance_of_speeds(arrived: Floats, expected: Floats) -> float:
    """Return the variance of z, with arrivals of mean z E and, for given z, variance z E; at least 0.001."""
    squares = float((expected * expected).sum())
    if not squares > 0:
        return LEAST_VARIANCE
    surplus = arrived - expected
    return max((float((surplus * surplus).sum()) - float(expected.sum())) / squares, LEAST_VARIANCE)
