"""Curves of bounded length: neighbouring points are merged when a curve is full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np

from paceline.report.run_data import Column

MOST_POINTS = 1_000


class MergedPoints:
    """Curve points, each the mean of equally many consecutive rows; the last point may have fewer.

    A full curve merges its points pairwise, which halves their number and doubles the rows of each.

    Args:
        axes: names of the positions of a row; a point has the positions of its last row.
        values: names of the values of a row; a point has the means of the finite ones, nan without one.
        most: largest number of points, even, >= 2.
    """

    def __init__(self, axes: Sequence[str], values: Sequence[str], most: int = MOST_POINTS) -> None:
        self._axes = tuple(axes)
        self._values = tuple(values)
        self._most = most
        self._length = 0
        self._rows_each = 1
        self._rows_in_last = 0
        self._positions = np.zeros((most, len(axes)))
        self._sums = np.zeros((most, len(values)))
        self._counts = np.zeros((most, len(values)))

    def __len__(self) -> int:
        return self._length

    def add(self, positions: Sequence[float], values: Sequence[float]) -> None:
        """Add a row."""
        if not self._length or self._rows_in_last == self._rows_each:
            self._begin_point()
        self._rows_in_last += 1
        last = self._length - 1
        self._positions[last] = positions
        for i, value in enumerate(values):
            if isfinite(value):
                self._sums[last, i] += value
                self._counts[last, i] += 1

    def _begin_point(self) -> None:
        if self._length == self._most:
            self._length //= 2
            self._rows_each *= 2
            self._positions[: self._length] = self._positions[1::2]
            for table in (self._sums, self._counts):
                table[: self._length] = table[::2] + table[1::2]
                table[self._length :] = 0
        self._length += 1
        self._rows_in_last = 0

    def columns(self) -> Mapping[str, Column]:
        """Return positions and means by name."""
        with np.errstate(invalid="ignore"):
            means = self._sums[: self._length] / self._counts[: self._length]
        positions = self._positions[: self._length]
        return dict(zip((*self._axes, *self._values), (*positions.T.copy(), *means.T), strict=True))
