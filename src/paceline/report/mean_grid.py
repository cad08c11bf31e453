"""Means by worker and time, in a grid of bounded size."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

HEAT_COLUMNS = 120  # at most
Column = NDArray[Any]


class HeatMap(NamedTuple):
    """Means by worker and time.

    Attributes:
        mean_s: mean compute times in seconds (or samples), of shape workers x slices; nan without an arrival.
        end_s: end of the last slice, in seconds; the first one begins at 0.
    """

    mean_s: Column
    end_s: float


class MeanGrid:
    """Sums of values in equal slices of time; when the slices are used up, pairs of them are merged."""

    def __init__(self) -> None:
        self._slice_s = 0.0
        self._sums = np.zeros((0, HEAT_COLUMNS))
        self._counts = np.zeros((0, HEAT_COLUMNS))
        self._used = 0  # slices

    def add(self, worker: Column, arrival_s: Column, value: Column) -> None:
        """Add the values of gradients.

        Args:
            worker: number of the worker of each gradient.
            arrival_s: time of each arrival, in seconds.
            value: value of each gradient, > 0; 0 and nan are left out.
        """
        known = (value > 0) & (arrival_s > 0)
        worker, arrival_s, value = worker[known], arrival_s[known], value[known]
        if not len(worker):
            return
        self._make_room(int(worker.max()) + 1, float(arrival_s[0]), float(arrival_s.max()))
        slices = (arrival_s / self._slice_s).astype(int)
        cells = worker * HEAT_COLUMNS + slices
        for table, weights in ((self._sums, value), (self._counts, None)):
            table += np.bincount(cells, weights, minlength=table.size).reshape(table.shape)  # `add.at` is much slower
        self._used = max(self._used, int(slices.max()) + 1)

    def _make_room(self, workers: int, first_s: float, last_s: float) -> None:
        missing = workers - len(self._sums)
        if missing > 0:
            self._sums = np.pad(self._sums, ((0, missing), (0, 0)))
            self._counts = np.pad(self._counts, ((0, missing), (0, 0)))
        self._slice_s = self._slice_s or 2 * first_s
        while last_s >= HEAT_COLUMNS * self._slice_s:
            self._slice_s *= 2
            self._sums = _merged(self._sums)
            self._counts = _merged(self._counts)

    def heat_map(self, workers: int) -> HeatMap:
        """Return the means, with a row for each of so many workers."""
        missing = max(0, workers - len(self._sums))
        with np.errstate(invalid="ignore"):
            means = (self._sums / self._counts)[:, : max(1, self._used)]
        rows = np.pad(means, ((0, missing), (0, 0)), constant_values=np.nan)
        return HeatMap(rows, max(1, self._used) * self._slice_s)


def _merged(cells: Column) -> Column:
    pairs = cells[:, ::2] + cells[:, 1::2]
    padded: Column = np.pad(pairs, ((0, 0), (0, HEAT_COLUMNS - pairs.shape[1])))
    return padded
